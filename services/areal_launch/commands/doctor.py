"""`areal doctor`: a table, or JSON; exit code 1 when a run would fail."""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from areal.config.experiment import GRPOConfig, build_config
from areal_launch.commands.stack import read_experiment
from areal_launch.doctor.local import Finding, Verdict, examine_here
from areal_launch.doctor.model import examine_model

_STYLE = {Verdict.OK: "green", Verdict.NOTE: "yellow", Verdict.MISSING: "bold red"}


def examine(
    on: str, recipe: Path | None, config: Path | None, overrides: list[str], *, as_json: bool
) -> int:
    """Prints what is there and what is not; returns the exit code.

    Args:
        on: local or kubernetes.
        recipe: the recipe, or the directory of a model alone; None: no recipe.
        config: the experiment's YAML.
        overrides: of its keys.
        as_json: one list instead of a table.
    """
    if recipe is not None and recipe.is_dir():
        return _report(examine_model(recipe), as_json=as_json)
    if recipe is not None:
        experiment, module = read_experiment(recipe, config, overrides)
        can_prepare = callable(getattr(module, "prepare_model", None))
    else:
        experiment, can_prepare = build_config(GRPOConfig, config, overrides), False
    if on == "kubernetes":
        from areal_launch.clusters.kubernetes import Release
        from areal_launch.doctor.kubernetes import ClusterDoctor

        with tempfile.TemporaryDirectory(prefix="areal-doctor-") as folder:
            experiment.recipe = experiment.recipe or _empty(Path(folder) / "recipe.py")
            findings = ClusterDoctor(Release(experiment, Path(folder))).examine()
    else:
        findings = examine_here(experiment, can_prepare=can_prepare)
        model = Path(experiment.model.path or ".")
        if (model / "config.json").is_file():
            findings += examine_model(model)
    return _report(findings, as_json=as_json)


def _report(findings: list[Finding], *, as_json: bool) -> int:
    if as_json:
        print(json.dumps([asdict(each) for each in findings], indent=2))  # noqa: T201
    else:
        _print(findings)
    return int(any(each.verdict is Verdict.MISSING for each in findings))


def _empty(file: Path) -> str:
    """The chart's own recipe then: an empty value asks for it."""
    file.touch()
    return str(file)


def _print(findings: list[Finding]) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bright_black")
    for header in ("check", "", "found", "how to fix"):
        table.add_column(header, overflow="fold")
    for each in findings:
        verdict = Text(each.verdict.value, _STYLE[each.verdict])
        table.add_row(each.name, verdict, Text(each.found), Text(each.fix))
    Console().print(table)
