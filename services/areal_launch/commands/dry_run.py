"""`areal run --dry-run`: what would be made on a cluster, printed instead."""

from __future__ import annotations

import tempfile
from pathlib import Path

from areal.config.experiment import BaseExperimentConfig
from areal.errors import InvalidInput
from areal_launch.commands.stack import read_experiment, resolve_run
from areal_launch.run_folder import RunFolder


def describe_run(on: str, recipe: Path, config: Path | None, overrides: list[str]) -> str:
    """Returns the release's objects as YAML, or the job script of Slurm; changes nothing.

    Raises:
        InvalidInput: `on` is neither kubernetes nor slurm, or the experiment is wrong.
        ArealError: helm cannot render the chart; its message says why.
    """
    if on == "kubernetes":
        experiment, _ = read_experiment(recipe, config, overrides)
        return _release(experiment)
    if on == "slurm":
        return _script(resolve_run(recipe, config, overrides).config)
    raise InvalidInput(f"--dry-run with --on {on}: expected --on kubernetes or --on slurm")


def _release(config: BaseExperimentConfig) -> str:
    from areal_launch.clusters.kubernetes import Release

    with tempfile.TemporaryDirectory(prefix="areal-dry-run-") as folder:
        return Release(config, Path(folder)).render()


def _script(config: BaseExperimentConfig) -> str:
    from areal_launch.clusters.slurm import render_script

    folder = RunFolder(config.run_dir.resolve())
    return render_script(config, folder.logs, folder.path / "job.yaml")
