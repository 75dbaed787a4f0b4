"""Which tests run and in what order: long files first, and of the long tests a share at a time.

Free workers take whole files (`--dist loadfile --no-loadscope-reorder`), in the order of
tests/durations.json: the longest first, so that no worker ends on a long one. What a file sets up,
its tests share, so a file is never divided between workers.

`make test` leaves out what is marked `long`. `--share=COMMIT` runs the part of it that this commit
stands for: the long tests are dealt into as many shares of about `--share-seconds` as are needed,
and the commit's hash chooses one, so that all of them run every few commits.
"""

from __future__ import annotations

import json
import math
import re
from argparse import ArgumentTypeError
from collections import defaultdict
from collections.abc import Iterable

import pytest
from tests.plugins.costs import DURATIONS

UNKNOWN_S = 5.0
"""Of a file or a long test that has not been recorded yet."""


def commit(text: str) -> str:
    """What `--share` takes; raises ArgumentTypeError for what is no hash."""
    if re.fullmatch("[0-9a-f]{7,40}", text) is None:
        raise ArgumentTypeError(f"{text!r}, expected a commit's hash: git rev-parse HEAD")
    return text


class Order:
    """The plugin."""

    def __init__(self, share: str | None, share_s: float, *, longest_first: bool) -> None:
        """Runs all that is chosen, or of it the share of a commit.

        Args:
            share: The commit's hash; None: all.
            share_s: Seconds of one share, as recorded.
            longest_first: Whether files are put in order; False: as they are named.
        """
        self._share, self._share_s, self._longest_first = share, share_s, longest_first
        self._seconds: dict[str, float] = json.loads(DURATIONS.read_text())
        self._page = ""

    @pytest.hookimpl(trylast=True)  # after markers have selected
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        if self._share:
            shares = deal(self._units(items), self._share_s)
            chosen = int(self._share, 16) % len(shares)
            self._page = page_of(shares, chosen)
            ours = {node for nodes, _ in shares[chosen].values() for node in nodes}
            config.hook.pytest_deselected(items=[i for i in items if i.nodeid not in ours])
            items[:] = [item for item in items if item.nodeid in ours]
        if not self._longest_first:
            return
        costs: dict[str, dict[str, float]] = defaultdict(dict)
        for item in items:
            costs[_file(item)][self._row(item)] = self._cost(item)
        items.sort(key=lambda item: (-sum(costs[_file(item)].values()), _file(item)))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._page:
            terminalreporter.section("long tests")
            terminalreporter.write_line(self._page)

    def _units(self, items: Iterable[pytest.Item]) -> dict[str, tuple[list[str], float]]:
        """What a share takes whole: the tests of a file; test by test where a file is too long."""
        files: dict[str, dict[str, float]] = defaultdict(dict)
        for item in items:
            files[_file(item)][item.nodeid] = self._cost(item)
        units: dict[str, tuple[list[str], float]] = {}
        for file, tests in files.items():
            if sum(tests.values()) > self._share_s:
                units |= {node: ([node], seconds) for node, seconds in tests.items()}
            else:
                units[file] = list(tests), sum(tests.values())
        return units

    def _row(self, item: pytest.Item) -> str:
        """The row of tests/durations.json to which a test counts."""
        return item.nodeid if item.get_closest_marker("long") else _file(item)

    def _cost(self, item: pytest.Item) -> float:
        return self._seconds.get(self._row(item), UNKNOWN_S)


def deal(
    units: dict[str, tuple[list[str], float]], seconds: float
) -> list[dict[str, tuple[list[str], float]]]:
    """Deals units (name -> tests, seconds) into shares of about `seconds`, always the same way."""
    count = max(1, math.ceil(sum(cost for _, cost in units.values()) / seconds))
    shares: list[dict[str, tuple[list[str], float]]] = [{} for _ in range(count)]
    for name, unit in sorted(units.items(), key=lambda each: (-each[1][1], each[0])):
        least = min(shares, key=lambda share: sum(cost for _, cost in share.values()))
        least[name] = unit
    return shares


def page_of(shares: list[dict[str, tuple[list[str], float]]], chosen: int) -> str:
    """What this share runs, and what the others hold."""
    lines = [f"share {chosen + 1} of {len(shares)}, chosen by the commit's hash, runs:"]
    for number, share in enumerate(shares):
        names = [f"{name} ({len(nodes)})" for name, (nodes, _) in sorted(share.items())]
        if number == chosen:
            lines[1:1] = [f"  {name}" for name in names]
        else:
            seconds = sum(cost for _, cost in share.values())
            lines.append(f"not now, share {number + 1} ({seconds:.0f} s): {', '.join(names)}")
    return "\n".join(lines)


def _file(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]
