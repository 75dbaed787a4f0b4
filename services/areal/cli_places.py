"""`areal run --on …`: the same experiment, elsewhere."""

from __future__ import annotations

from pathlib import Path

from areal.cli import RunsOn
from areal.cli_stack import resolve_run, run_foreground
from areal.launchers.places import Place


def run_on(
    on: RunsOn,
    recipe: Path,
    config: Path | None,
    overrides: list[str],
    *,
    as_json: bool,
    keep: bool,
) -> int:
    """Resolves the experiment and runs it there; returns the exit code."""
    resolved = resolve_run(recipe, config, overrides)
    place: Place | None = None
    if on is RunsOn.SLURM:
        from areal.launchers.slurm import SlurmPlace, in_allocation

        if not in_allocation():
            from areal.cli_slurm import submit_and_follow

            return submit_and_follow(resolved.config, as_json=as_json)
        place = SlurmPlace()
    return run_foreground(resolved, with_trainer=True, as_json=as_json, place=place)
