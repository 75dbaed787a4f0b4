from __future__ import annotations

from pathlib import Path

import pytest

from areal.config.experiment import GRPOConfig
from areal.errors import ConfigError
from areal_trainer.config import TrainerConfig


def test_config_when_under_torchrun_then_takes_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    config = TrainerConfig.from_experiment(GRPOConfig(recipe="a.py"), Path("c.yaml"))
    assert (config.rank, config.world_size, config.local_rank) == (5, 8, 1)


def test_config_when_alone_then_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    config = TrainerConfig.from_experiment(GRPOConfig(recipe="a.py"), Path("c.yaml"))
    assert (config.rank, config.world_size, config.local_rank) == (0, 1, 0)


def test_config_when_no_recipe_then_says_what_is_expected() -> None:
    with pytest.raises(ConfigError, match=r"recipe ''.*path of a recipe file"):
        TrainerConfig.from_experiment(GRPOConfig(), Path("c.yaml"))
