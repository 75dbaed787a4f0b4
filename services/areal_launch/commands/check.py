"""`areal check`: runs a row through a recipe with a fake policy; exit code 1 if a stage fails."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict
from pathlib import Path

from areal.config.experiment import cautions
from areal_launch.commands.stack import resolve_run
from areal_launch.stack.recipe_check import Finding, check_recipe
from areal_launch.view.output import CheckResult, print_json, print_table, say


def check(recipe: Path, config: Path | None, overrides: list[str], *, as_json: bool) -> int:
    """Prints what was found; returns the exit code."""
    began = time.monotonic()
    resolved = resolve_run(recipe, config, overrides)
    findings = [
        Finding("config", "", CheckResult.NOTE, caution) for caution in cautions(resolved.config)
    ] + asyncio.run(check_recipe(resolved.config, model_later=resolved.model_later))
    failed = [each for each in findings if each.verdict is CheckResult.FAILED]
    if as_json:
        print_json([asdict(each) for each in findings])
        return int(bool(failed))
    print_table(
        ("stage", "", "found"),
        [
            (
                f"{each.stage} ({each.of})" if each.of else each.stage,
                each.verdict.styled(),
                each.said,
            )
            for each in findings
        ],
    )
    # Several workflows of a recipe often fail in the same place.
    for trace in dict.fromkeys(each.traceback.rstrip() for each in failed):
        if trace:
            say(f"\n{trace}")
    say(f"\n{time.monotonic() - began:.1f} s, nothing was started")
    return int(bool(failed))
