"""What Compose makes of a recipe, before any container that trains starts."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from tools.compose import init

from areal.config.experiment import load_service_config
from areal.recipe import Recipe, find_config_class, load_recipe

HELPER = """\
from dataclasses import dataclass

from areal import GRPOConfig

@dataclass
class Config(GRPOConfig):
    wall: float = 0.2
"""


def test_experiment_when_the_recipe_is_a_folder_then_services_load_it_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipes, data = tmp_path / "recipes", tmp_path / "data"
    (recipes / "mine").mkdir(parents=True)
    data.mkdir()
    (recipes / "mine" / "recipe.py").write_text(
        "from .settings import Config\n\ndef main(argv): pass\n"
    )
    (recipes / "mine" / "settings.py").write_text(HELPER)
    (recipes / "mine" / "recipe.yaml").write_text(
        "experiment_name: mine\nmodel:\n  path: models/tiny\nwall: 0.5\n"
    )
    monkeypatch.setattr(init, "RECIPES", recipes)
    monkeypatch.setattr(init, "DATA", data)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("AREAL_RECIPE", "mine")
    monkeypatch.setenv("AREAL_ARGS", "total_train_steps=3")
    monkeypatch.setenv("AREAL_PROFILES", "")
    experiment = init.resolve_experiment()
    assert (experiment["wall"], experiment["total_train_steps"]) == (0.5, 3)
    config = load_service_config(data / "config.yaml")
    folder = Path(config.recipe)
    assert folder == recipes / "mine"
    module = load_recipe(Recipe.read(folder).source, str(folder))
    assert find_config_class(module, type(config))().wall == 0.2
