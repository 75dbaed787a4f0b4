"""The table of faults and recoveries, for people and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table
from tests.chaos.books import Check
from tests.chaos.faults import Fault


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
        ready = [f.ready_s for f in those if f.ready_s is not None]
        paused = [f.pause_s for f in those if f.pause_s is not None]
        rows.append(
            {
                "victim": victim,
                "action": action,
                "times": len(those),
                "ready_median_s": round(median(ready), 2) if ready else None,
                "ready_worst_s": max(ready, default=None),
                "pause_median_s": round(median(paused), 2) if paused else None,
                "pause_worst_s": max(paused, default=None),
            }
        )
    return rows


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
