"""`python -m areal_trainer.prepare --config FILE`: the recipe's own `prepare_model(config)`.

A recipe that makes its model on the spot defines `prepare_model`; it runs once, before the
inference servers need version 0. One that starts from a downloaded model has none.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from areal.chassis.collector import collector_paused
from areal.chassis.logging import configure_logging
from areal.config.experiment import GRPOConfig, load_expr_config, load_service_config
from areal.errors import ArealError, CannotStart
from areal.recipe import Recipe, find_config_class, load_recipe


def make_model(config: Path) -> bool:
    """Runs the recipe's prepare_model; False: it has none.

    Raises:
        InvalidInput: Recipe or experiment file cannot be read.
        CannotStart: Torch is not installed here.
    """
    base = load_service_config(config)
    recipe = Path(base.recipe)
    with collector_paused():
        module = load_recipe(Recipe.read(recipe).source, str(recipe))
    if not hasattr(module, "prepare_model"):
        return False
    try:
        with collector_paused():
            import torch
    except ImportError as error:
        raise CannotStart(f"{error}; pip install 'areal-services[trainer]'") from None

    torch.set_num_threads(1)
    configure_logging("prepare", base.namespace)
    schema = find_config_class(module, GRPOConfig)
    experiment, _ = load_expr_config(["--config", str(config)], schema)
    module.prepare_model(experiment)
    return True


def prepare(config: Annotated[Path, typer.Option(help="The experiment file.")]) -> None:
    """Runs the recipe's prepare_model, if it has one."""
    try:
        make_model(config)
    except ArealError as error:
        print(f"areal-trainer: {error}", file=sys.stderr)  # noqa: T201 - the one line for people
        raise typer.Exit(2) from None


if __name__ == "__main__":
    typer.run(prepare)
