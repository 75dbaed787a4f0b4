"""Puts what runs in place of what the user left open in `allocation_mode`: `auto`, and `|`.

    auto ──> `auto.choose` ──┐
    …|…  ────────────────────┴─> `sharing.split` ──> …|…@shared or …|…@alternating, a server's part

Services, servers and trainer read the result in the experiment file of the run.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from areal.config.allocation import Sharing, parse_allocation
from areal.config.experiment import BaseExperimentConfig, validate
from areal.errors import InvalidInput
from areal.memory_estimate import ModelShape
from areal_launch.clusters.base import servers_on_gpus
from areal_launch.doctor.auto import choose
from areal_launch.doctor.gpus import Machine, free_bytes, look
from areal_launch.doctor.model_config import fetch_config
from areal_launch.doctor.sharing import split


@dataclass(frozen=True)
class Settled:
    """The allocation that was decided, and why."""

    why: str = ""
    """The reasoning in one line; "": there was nothing to decide."""
    servers_part: float = 0.0
    """See `Placement`."""


def settle(config: BaseExperimentConfig, shape: ModelShape | None, machine: Machine) -> Settled:
    """Changes `config.allocation_mode` to what runs.

    Args:
        config: Valid, and remains so.
        shape: The model's sizes; None: they cannot be read yet.
        machine: From `look`, with memory.

    Raises:
        CannotStart: The model does not fit, or the GPUs cannot be used.
        ConfigError: Another key does not go with what was chosen.
    """
    given = config.allocation_mode
    if not open_question(config):
        return Settled()
    free = free_bytes(config, machine)
    whys = []
    if not parse_allocation(given).chosen:
        choice = choose(config, shape, free)
        config.allocation_mode = choice.allocation_mode
        whys.append(choice.why)
    part = 0.0
    allocation = parse_allocation(config.allocation_mode)
    if allocation.sharing.together:
        sharing = allocation.sharing
        if free and servers_on_gpus(config):
            found = split(config, shape, min(free[: allocation.gpus]))
            sharing, part = found.sharing, found.part
            whys = whys or [found.why]
        elif sharing is Sharing.FITTING:
            sharing = Sharing.SHARED
            whys.append("servers and trainer share no GPU")
        config.allocation_mode = str(replace(allocation, sharing=sharing))
    validate(config)
    chosen = f"allocation_mode {given!r} is {config.allocation_mode!r}"
    return Settled(f"{chosen}: {'; '.join(whys)}" if whys else "", part)


def open_question(config: BaseExperimentConfig) -> bool:
    """Whether `allocation_mode` leaves something to be decided on this machine."""
    allocation = parse_allocation(config.allocation_mode)
    return allocation.sharing.together or not allocation.chosen


def settle_here(
    config: BaseExperimentConfig, source: str = "", *, with_trainer: bool = True
) -> Settled:
    """Settles the allocation for this machine, before anything starts.

    Args:
        config: Valid, and remains so.
        source: Where the model is still to be fetched from; its config.json is fetched now.
        with_trainer: See `look`.

    Raises:
        CannotStart | ConfigError: See `settle`.
    """
    if not open_question(config):
        return Settled()
    with tempfile.TemporaryDirectory(prefix="areal-model-") as name:
        folder = Path(config.model.path or ".")
        if not (folder / "config.json").is_file() and fetch_config(source, Path(name)):
            folder = Path(name)
        shape = shape_of(folder)
    return settle(config, shape, look(config, with_trainer=with_trainer, memory=True))


def shape_of(folder: Path) -> ModelShape | None:
    """Returns a model's sizes; None: it is not there, or its memory cannot be estimated."""
    try:
        return ModelShape.read(folder)
    except InvalidInput:
        return None
