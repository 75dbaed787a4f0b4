"""The table that `make chaos` writes replaces all of the one before."""

from __future__ import annotations

from pathlib import Path

from tests.chaos.faults import KILL, STOP, Fault
from tests.chaos.report import BEGIN, END, write_table

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "failure-modes.md"


def test_table_when_written_again_then_nothing_of_the_one_before_is_left(tmp_path: Path) -> None:
    copy = tmp_path / "failure-modes.md"
    copy.write_text(DOCUMENT.read_text())
    before, _, rest = copy.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    faults = [
        Fault("rank-1", KILL, 1.0, ready_s=11.25, pause_s=12.5),
        Fault("torchrun", STOP, 2.0, stopped_s=3.0, ready_s=0.25, pause_s=None),
        Fault("inference-0", KILL, 3.0, ready_s=None, pause_s=None),
    ]
    write_table(copy, faults, seed=4, ranks=2, cores=8)
    written = copy.read_text().removeprefix(before + BEGIN).removesuffix(END + after)
    assert "seed 4, 3 faults, 2 trainer ranks, 8 CPU cores" in written
    assert "| rank | 1 | 11.2 s (11.2 s) | 12.5 s (12.5 s) |" in written
    assert "| torchrun | 1 | 0.2 s (0.2 s) | - |" in written
    assert "| inference | 1 | - | - |" in written
    assert written.count("\n| ") == 2 + 3, "two heads and a row for each: nothing else"
    assert written.count(" s (") == 3, "no figure of an earlier run"
    write_table(copy, faults[:1], seed=5, ranks=1, cores=2)
    assert "seed 4" not in copy.read_text()
    assert (copy.read_text().startswith(before), copy.read_text().endswith(after)) == (True, True)
