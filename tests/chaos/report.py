"""The table of faults and recoveries: for people, as JSON, and in docs/failure-modes.md."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table
from tests.chaos.books import Check
from tests.chaos.faults import KILL, Fault

BEGIN, END = "<!-- written by make chaos: begin -->", "<!-- written by make chaos: end -->"
# What a user sees of a process that was killed, and what is lost; the rest is measured.
SEEN = {
    "trainer": (
        "`trainer ended with signal 9; restart 1`; the steps since the checkpoint run again",
        "",
    ),
    "torchrun": (
        "`trainer ended with signal 9; restart 1`; the steps since the checkpoint run again",
        "",
    ),
    "rank": ("`rank_lost` with its number; the steps since the checkpoint run again", ""),
    "inference": ("`QUARANTINED` in `areal status`, then SERVING", "the tokens it had not sent"),
    "rollout": (
        "`died and was started again` as the reason of its tasks",
        "the tokens of its episodes",
    ),
    "reward": ("calls to score are retried", ""),
    "reward-worker": ("`worker_ended`", ""),
    "buffer": ("calls are retried; `leases_extended`", ""),
    "redis": ("calls are retried", ""),
    "weight-sync": ("the next process takes over within 3 s", ""),
    "nats": ("`announcements_paused`", ""),
    "gateway": ("the dashboard reconnects", ""),
    "guard": ("`guard ended`; it is started again", ""),
}


def as_dict(
    seed: int, minutes: float, wall_s: float, faults: Sequence[Fault], checks: Sequence[Check]
) -> dict[str, Any]:
    """Everything, JSON types only."""
    return {
        "seed": seed,
        "minutes": minutes,
        "wall_s": round(wall_s, 1),
        "recoveries": recoveries(faults),
        "faults": [asdict(fault) for fault in faults],
        "checks": [asdict(check) for check in checks],
    }


def recoveries(faults: Sequence[Fault]) -> list[dict[str, Any]]:
    """By victim and action: how often, and how long it took."""
    rows = []
    for victim, action in sorted({(f.victim, f.action) for f in faults}):
        those = [f for f in faults if (f.victim, f.action) == (victim, action)]
        rows.append({"victim": victim, "action": action, **_figures(those)})
    return rows


def _figures(faults: Sequence[Fault]) -> dict[str, Any]:
    ready = [f.ready_s for f in faults if f.ready_s is not None]
    paused = [f.pause_s for f in faults if f.pause_s is not None]
    return {
        "times": len(faults),
        "ready_median_s": round(median(ready), 2) if ready else None,
        "ready_worst_s": max(ready, default=None),
        "pause_median_s": round(median(paused), 2) if paused else None,
        "pause_worst_s": max(paused, default=None),
    }


def show(report: dict[str, Any], console: Console) -> None:
    """Two tables."""
    table = Table(title=f"{len(report['faults'])} faults, seed {report['seed']}")
    heads = ("process", "what", "times", "ready again: median", "worst", "training paused: median")
    for head in (*heads, "worst"):
        table.add_column(head, justify="left" if head in ("process", "what") else "right")
    for row in report["recoveries"]:
        keys = ("ready_median_s", "ready_worst_s", "pause_median_s", "pause_worst_s")
        seconds = ["-" if row[key] is None else f"{row[key]:.2f} s" for key in keys]
        table.add_row(row["victim"], row["action"], str(row["times"]), *seconds)
    console.print(table)
    checks = Table(title=f"afterwards ({report['wall_s']:.0f} s in all)")
    for head in ("must hold", "", "seen"):
        checks.add_column(head)
    for check in report["checks"]:
        mark = "[green]yes[/]" if check["holds"] else "[bold red]NO[/]"
        checks.add_row(check["name"], mark, check["detail"])
    console.print(checks)


def write_table(file: Path, faults: Sequence[Fault], *, seed: int, ranks: int, cores: int) -> None:
    """Replaces what stands between the marks of a Markdown file."""
    head, _, rest = file.read_text().partition(BEGIN)
    _, mark, tail = rest.partition(END)
    assert mark, f"{file}: expected the lines {BEGIN!r} and {END!r}"
    table = "\n".join(_markdown(faults, seed=seed, ranks=ranks, cores=cores))
    file.write_text(f"{head}{BEGIN}\n{table}\n{END}{tail}")


def _markdown(faults: Sequence[Fault], *, seed: int, ranks: int, cores: int) -> Iterator[str]:
    yield (
        f"{time.strftime('%Y-%m-%d')}, seed {seed}, {len(faults)} faults, {ranks} trainer "
        f"rank{'s' if ranks > 1 else ''}, {cores} CPU cores,"
    )
    yield "up to three processes killed or stopped at once. Times are the median, and the"
    yield "worst in brackets:"
    yield ""
    killed = {kind: _of(faults, kind, killed=True) for kind in SEEN}
    yield from _table("killed with -9", "ready again", killed)
    yield ""
    stopped = {kind: _of(faults, kind, killed=False) for kind in SEEN}
    yield from _table("stopped for 1 to 20 s", "ready after SIGCONT", stopped)
    yield ""
    yield "Of the kills, a user sees:"
    yield ""
    for kind, (sees, lost) in SEEN.items():
        if killed[kind]:
            text = f"{kind}: {sees}. Lost: {lost or 'nothing'}."
            yield from textwrap.wrap(text, 80, initial_indent="- ", subsequent_indent="  ")


def _of(faults: Sequence[Fault], kind: str, *, killed: bool) -> list[Fault]:
    return [f for f in faults if _kind(f.victim) == kind and (f.action == KILL) is killed]


def _table(what: str, ready: str, faults: Mapping[str, Sequence[Fault]]) -> Iterator[str]:
    yield f"| {what} | times | {ready} | training paused |"
    yield "|---|---|---|---|"
    for kind, those in faults.items():
        if those:
            row = _figures(those)
            times = " | ".join(_seconds(row, key) for key in ("ready", "pause"))
            yield f"| {kind} | {row['times']} | {times} |"


def _kind(victim: str) -> str:
    """`inference-1` is an inference server like any other."""
    name, _, number = victim.rpartition("-")
    return name if number.isdigit() else victim


def _seconds(row: dict[str, Any], key: str) -> str:
    middle, worst = row[f"{key}_median_s"], row[f"{key}_worst_s"]
    return "-" if middle is None else f"{middle:.1f} s ({worst:.1f} s)"
