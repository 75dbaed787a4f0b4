"""`areal check`: one row through a recipe with a fake policy; exit code 1 when something fails."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from areal_launch.commands.stack import resolve_run
from areal_launch.stack.recipe_check import Finding, Verdict, check_recipe

_STYLE = {Verdict.OK: "green", Verdict.UNKNOWN: "yellow", Verdict.FAILED: "bold red"}


def check(recipe: Path, config: Path | None, overrides: list[str], *, as_json: bool) -> int:
    """Prints what was found; returns the exit code."""
    began = time.monotonic()
    resolved = resolve_run(recipe, config, overrides)
    findings = asyncio.run(check_recipe(resolved.config, model_later=resolved.prepare))
    if as_json:
        print(json.dumps([asdict(each) for each in findings], indent=2))  # noqa: T201
    else:
        _print(findings, time.monotonic() - began)
    return int(any(each.verdict is Verdict.FAILED for each in findings))


def _print(findings: list[Finding], seconds: float) -> None:
    console = Console()
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for each in findings:
        stage = f"{each.stage} ({each.of})" if each.of else each.stage
        table.add_row(stage, Text(each.verdict.value, _STYLE[each.verdict]), Text(each.said))
    console.print(table)
    for each in findings:
        if each.verdict is Verdict.FAILED and each.traceback:
            console.print(Text(f"\n{each.traceback.rstrip()}", "bright_black"))
    console.print(Text(f"\n{seconds:.1f} s, nothing was started", "bright_black"))
