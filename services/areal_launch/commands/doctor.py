"""`areal doctor`: prints a table or JSON; exit code 1 if a run would fail."""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from pathlib import Path

from areal.config.experiment import GRPOConfig, build_config
from areal.config.model_origin import find_model
from areal.recipe_folder import ENTRY
from areal_launch.commands.stack import read_experiment
from areal_launch.doctor.findings import Finding
from areal_launch.doctor.gpu_trial import try_on_gpus
from areal_launch.doctor.local import examine_here
from areal_launch.doctor.model import examine_model
from areal_launch.doctor.model_config import fetch_config
from areal_launch.view.output import print_json, print_table


def examine(
    on: str,
    recipe: Path | None,
    config: Path | None,
    overrides: list[str],
    *,
    as_json: bool,
    try_gpus: bool = False,
) -> int:
    """Prints what a run needs and whether it is there; returns the exit code.

    Args:
        on: Where the run would start.
        recipe: A recipe (a file, or a folder with recipe.py), or the directory of a model; then
            only the model is examined.
        config: The experiment file.
        overrides: `KEY=VALUE` settings.
        as_json: Print JSON.
        try_gpus: Compute on the GPUs, too.
    """
    if recipe is not None and recipe.is_dir() and not (recipe / ENTRY).is_file():
        return _report(examine_model(recipe), as_json=as_json)
    if recipe is not None:
        experiment, module = read_experiment(recipe, config, overrides)
        can_prepare = callable(getattr(module, "prepare_model", None))
    else:
        experiment, can_prepare = build_config(GRPOConfig, config, overrides), False
    source = ""
    if on != "kubernetes":
        place, source = find_model(experiment.model.path, made=can_prepare)
        experiment.model.path = str(place) if source else experiment.model.path
        can_prepare = can_prepare or bool(source)
    if on == "kubernetes":
        from areal_launch.clusters.kubernetes import Release
        from areal_launch.doctor.kubernetes import ClusterDoctor

        with tempfile.TemporaryDirectory(prefix="areal-doctor-") as folder:
            experiment.recipe = experiment.recipe or _empty(Path(folder) / "recipe.py")
            findings = ClusterDoctor(Release(experiment, Path(folder))).examine()
    else:
        model = Path(experiment.model.path or ".")
        there = (model / "config.json").is_file()
        with tempfile.TemporaryDirectory(prefix="areal-doctor-") as folder:
            fetched = Path(folder) if not there and fetch_config(source, Path(folder)) else None
            findings = examine_here(experiment, can_prepare=can_prepare, described_in=fetched)
            if try_gpus:
                findings += try_on_gpus(experiment, model if there else fetched)
        if there:
            findings += examine_model(model)
    return _report(findings, as_json=as_json)


def _report(findings: list[Finding], *, as_json: bool) -> int:
    if as_json:
        print_json([asdict(each) for each in findings])
    else:
        rows = [(each.name, each.verdict.styled(), each.found, each.fix) for each in findings]
        print_table(("check", "", "found", "how to fix"), rows)
    return int(any(each.verdict.fatal for each in findings))


def _empty(file: Path) -> str:
    """Creates an empty recipe, for which the chart substitutes its own; returns its path."""
    file.touch()
    return str(file)
