"""What `scale_simulator.py` measures: CPU, memory and calls of a stack, and how they grow."""

from __future__ import annotations

import math
import re
import urllib.request
from typing import Any

import psutil
from tests.rollout_stack import Stack

Row = dict[str, float]

_RPC = re.compile(r'areal_\w+_rpc_seconds_(count|sum)\{code="OK",method="(\w+)"\} (\S+)')


def processes(whole: Stack, service: str) -> list[str]:
    """Names of a service's processes."""
    return [name for name in whole.processes if name.rstrip("0123456789-") == service]


def cpu_seconds(whole: Stack, service: str) -> float:
    """User and system time of all its processes and their children."""
    total = 0.0
    for name in processes(whole, service):
        tree = psutil.Process(whole.processes[name].pid)
        for each in (tree, *tree.children(recursive=True)):
            times = each.cpu_times()
            total += times.user + times.system
    return total


def memory(whole: Stack, service: str) -> int:
    """Resident bytes of all its processes."""
    return sum(
        psutil.Process(whole.processes[name].pid).memory_info().rss
        for name in processes(whole, service)
    )


def page(whole: Stack, process: str) -> str:
    """Reads the /metrics of a process."""
    with urllib.request.urlopen(f"http://{whole.metrics[process]}/metrics", timeout=120) as answer:
        return str(answer.read().decode())


def metric(whole: Stack, process: str, name: str) -> float:
    """One without labels, of a process that may be busy."""
    lines = page(whole, process).splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith(f"{name} ")))


def calls(whole: Stack, process: str) -> dict[str, tuple[float, float]]:
    """(number, seconds) of the RPCs that a process has answered, by method."""
    found: dict[str, dict[str, float]] = {}
    for kind, method, value in _RPC.findall(page(whole, process)):
        found.setdefault(method, {})[kind] = float(value)
    return {method: (each["count"], each["sum"]) for method, each in found.items()}


def calls_between(
    before: dict[str, tuple[float, float]], after: dict[str, tuple[float, float]]
) -> dict[str, tuple[float, float]]:
    """(number, milliseconds each) of what was answered between two looks."""
    between = {}
    for method, (number, seconds) in after.items():
        earlier = before.get(method, (0.0, 0.0))
        if (done := number - earlier[0]) > 0:
            between[method] = (done, round(1e3 * (seconds - earlier[1]) / done, 2))
    return between


def growth(rows: list[Row], by: str) -> dict[str, float]:
    """How much each cost grows per tenfold `by`; 1: not at all, 10: linearly.

    Between the smallest and the largest of the rows that are alike but for `by`.
    """
    other = {"servers": "episodes", "episodes": "servers"}[by]
    last = max(rows, key=lambda row: (row[by], -row[other]))
    alike = [row for row in rows if row[other] == last[other]]
    first = min(alike, key=lambda row: row[by])
    if first[by] == last[by]:
        return {}
    tens = math.log10(last[by] / first[by])
    return {
        key: round((max(last[key], 1e-9) / max(first[key], 1e-9)) ** (1 / tens), 2)
        for key in costs(first)
    }


def costs(row: Row) -> list[str]:
    """The figures of which one asks how they grow."""
    ends = ("_us", "_kib", "_s", "_per_server")
    return [key for key in row if key.endswith(ends) and key != "episodes_per_s" and row[key]]


def table(rows: list[Row]) -> str:
    """One column a size, and how each figure grows."""
    grows = {by: growth(rows, by) for by in ("servers", "episodes")}
    heads = [f"{row['servers']:.0f}x{row['episodes']:.0f}" for row in rows]
    lines = [f"{'':30s}" + "".join(f"{head:>14s}" for head in (*heads, "servers x10", "eps x10"))]
    for key in rows[0]:
        if key in ("servers", "episodes"):
            continue
        cells: list[Any] = [f"{row[key]:.6g}" for row in rows]
        cells += [grows[by].get(key, "") for by in ("servers", "episodes")]
        lines.append(f"{key:30s}" + "".join(f"{cell:>14}" for cell in cells))
    return "\n".join(lines)
