"""`areal run --on …`: the same experiment, elsewhere."""

from __future__ import annotations

from pathlib import Path

from areal.cli_stack import resolve_run, run_foreground
from areal.launchers.places import Place


def run_on(
    on: str,
    recipe: Path,
    config: Path | None,
    overrides: list[str],
    *,
    as_json: bool,
) -> int:
    """Resolves the experiment and runs it there: local, slurm or ray; the exit code."""
    resolved = resolve_run(recipe, config, overrides)
    place: Place | None = None
    if on == "slurm":
        from areal.launchers.slurm import SlurmPlace, in_allocation

        if not in_allocation():
            from areal.cli_slurm import submit_and_follow

            return submit_and_follow(resolved.config, as_json=as_json)
        place = SlurmPlace()
    elif on == "ray":
        from areal.launchers.ray import RayPlace

        place = RayPlace()
    return run_foreground(resolved, with_trainer=True, as_json=as_json, place=place)
