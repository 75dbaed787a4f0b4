"""docs/metrics.md has each metric once, and each metric on it is produced."""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path

from tests.metric_names import undocumented

from areal.runs.metric_names import METRICS, NAMES, evaluation_names, named
from areal_trainer.metrics import _GAUGES

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import gen_metrics  # noqa: E402

ALL = [metric for section in METRICS.values() for metric in section]


def test_page_when_generated_again_then_it_is_the_committed_one() -> None:
    assert gen_metrics.page() == (ROOT / "docs" / "metrics.md").read_text(), "make docs"


def test_names_when_listed_then_each_is_there_once_and_has_a_meaning() -> None:
    assert [n for n, count in Counter(m.name for m in ALL).items() if count > 1] == []
    statistics = [each for metric in ALL for each in metric.statistics]
    assert [n for n, count in Counter(statistics).items() if count > 1] == []
    assert all(len(metric.meaning) > 5 for metric in ALL)
    assert not set(NAMES) & {metric.name for metric in ALL}  # renamed twice, a row stays as it is


def test_table_when_read_then_some_code_produces_each_metric() -> None:
    services = ROOT / "services"
    rooms = ("areal_torch", "areal/runs")
    files = [f for room in rooms for f in room_files(services, room)]
    files.append(services / "areal" / "types.py")  # names of parts of a reward
    source = "\n".join(file.read_text() for file in files)
    unproduced = []
    for metric in ALL:
        group, _, last = metric.name.partition("/")
        names = {metric.name, *metric.statistics}
        # Written as f"critic/{name}", f"{phase}_seconds" and f"reward/{name}".
        if group in ("critic", "time", "reward"):
            names.add(last)
        if "NAME" not in last and not any(
            re.search(f"[\"']{re.escape(n)}[\"']", source) for n in names
        ):
            unproduced.append(metric.name)
    assert unproduced == []


def room_files(services: Path, room: str) -> list[Path]:
    return [f for f in (services / room).rglob("*.py") if f.name != "metric_names.py"]


def test_key_when_the_table_does_not_have_it_then_it_is_found() -> None:
    rows = [{"step": 1, "train/loss": 0.5, "reward/format": 1.0}, {"train/los": 0.5}]
    assert undocumented(rows) == {"train/los"}
    assert undocumented([{"reward/": 1, "eval/heldout/median": 1}]) == {
        "reward/",
        "eval/heldout/median",
    }
    assert undocumented([evaluation_names("held-out.2", 0.5, 0.1), named({"kl": 0.1})]) == set()


def test_gauges_of_the_trainer_when_listed_then_each_is_of_a_metric() -> None:
    assert set(_GAUGES) <= {metric.name for metric in ALL}
