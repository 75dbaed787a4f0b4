"""What the trainer process takes from the experiment file and from torchrun's environment."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from areal.config.experiment import GRPOConfig
from areal.errors import ConfigError


@dataclass(frozen=True)
class TrainerConfig:
    """One rank's place in the world."""

    experiment: GRPOConfig
    config_file: Path
    """The experiment file, passed on to the recipe's `main`."""
    rank: int
    world_size: int
    local_rank: int
    only_evaluates: bool = False
    """Whether the recipe ends when it asks for its first batch."""

    @classmethod
    def from_experiment(
        cls, experiment: GRPOConfig, config_file: Path, *, only_evaluates: bool = False
    ) -> TrainerConfig:
        """Reads RANK, WORLD_SIZE and LOCAL_RANK (one rank without them).

        Raises:
            ConfigError: No recipe is named.
        """
        if not experiment.recipe:
            raise ConfigError("recipe '': expected the path of a recipe file")
        return cls(
            experiment=experiment,
            config_file=config_file,
            rank=int(os.environ.get("RANK", "0")),
            world_size=int(os.environ.get("WORLD_SIZE", "1")),
            local_rank=int(os.environ.get("LOCAL_RANK", "0")),
            only_evaluates=only_evaluates,
        )
