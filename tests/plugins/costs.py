"""What each test costs, by phase: `--costs=FOLDER` records, this module as a program adds up.

    make durations                                   # a whole run, recorded, then added up
    python -m tests.plugins.costs FOLDER [--write]   # the table; --write: tests/durations.json

A row is one phase of one test, or the import of one file: wall seconds, CPU seconds of this
process, and CPU seconds of the processes that ended in it. tests/durations.json keeps the wall
seconds of each file, and those of each test that is marked `long`.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

DURATIONS = Path(__file__).parents[1] / "durations.json"
_LISTED = 60


class Costs:
    """The plugin; each worker writes a file of its own."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
        self._file = (folder / f"{worker}-{os.getpid()}.jsonl").open("a")

    @contextmanager
    def _measured(self, phase: str, node: str, **more: Any) -> Iterator[None]:
        before = _now()
        try:
            yield
        finally:
            wall, own, children = (b - a for a, b in zip(before, _now(), strict=True))
            row = {"phase": phase, "node": node, "wall": wall, "own": own, "children": children}
            self._file.write(json.dumps(row | more) + "\n")
            self._file.flush()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> Iterator[Any]:
        with self._measured("collect", collector.nodeid):
            return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[Any]:
        with self._measured("setup", item.nodeid, **_marks(item)):
            return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[Any]:
        with self._measured("call", item.nodeid, **_marks(item)):
            return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Iterator[Any]:
        with self._measured("teardown", item.nodeid, **_marks(item)):
            return (yield)


def _marks(item: pytest.Item) -> dict[str, bool]:
    return {name: item.get_closest_marker(name) is not None for name in ("long", "process")}


def _now() -> tuple[float, float, float]:
    own, children = (
        resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    return (
        monotonic(),
        own.ru_utime + own.ru_stime,
        children.ru_utime + children.ru_stime,
    )


def read(folder: Path) -> list[dict[str, Any]]:
    """The rows of a recorded run."""
    return [json.loads(line) for file in sorted(folder.glob("*.jsonl")) for line in file.open()]


def durations(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Wall seconds of each file's tests that are not long, and of each long test."""
    found: dict[str, float] = defaultdict(float)
    for row in rows:
        if row["phase"] != "collect":
            node = row["node"] if row["long"] else row["node"].partition("::")[0]
            found[node] += row["wall"]
    return {node: round(seconds, 1) for node, seconds in sorted(found.items())}


def table(rows: list[dict[str, Any]]) -> str:
    """Sums by phase, then the files that cost the most CPU."""

    def lines(title: str, sums: dict[str, list[float]], count: int) -> list[str]:
        ordered = sorted(sums.items(), key=lambda each: -each[1][1] - each[1][2])
        return [
            f"{'wall s':>8} {'CPU s':>8} {'children':>8}  {title}",
            *(
                f"{w:8.1f} {own:8.1f} {kids:8.1f}  {name}"
                for name, (w, own, kids) in ordered[:count]
            ),
        ]

    phases: dict[str, list[float]] = defaultdict(lambda: [0.0] * 3)
    files: dict[str, list[float]] = defaultdict(lambda: [0.0] * 3)
    for row in rows:
        costs = [row["wall"], row["own"], row["children"]]
        for sums in (phases[row["phase"]], files[row["node"].partition("::")[0]]):
            sums[:] = [a + b for a, b in zip(sums, costs, strict=True)]
    shown = (*lines("phase", phases, len(phases)), "", *lines("file", files, _LISTED))
    return "\n".join(shown)


def main(arguments: list[str]) -> int:
    """Prints the table of a recorded run; with --write keeps its durations."""
    rows = read(Path(arguments[0]))
    print(table(rows))
    if "--write" in arguments:
        known = json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}
        known = {node: s for node, s in known.items() if Path(node.partition("::")[0]).exists()}
        DURATIONS.write_text(json.dumps(known | durations(rows), indent=0) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
