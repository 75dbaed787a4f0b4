"""Servers and trainer on the same GPUs: do both fit at once, or must they take turns?

    free ─┬─ shared:      trainer's peak ÷ 0.8 │ server: CUDA, graphs │ weights │ cache
          └─ alternating: trainer's peak ÷ 0.8 │ what a server keeps asleep
                          trainer's CUDA       │ server: CUDA, graphs │ weights │ cache    (in turn)

The estimates are those of `areal.memory_estimate` and `doctor.memory`. SGLang's
`--mem-fraction-static` is the part of the memory that is free when it starts which weights and
cache may take; the launcher starts the trainer after the servers, so that both see the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from areal.config.allocation import Sharing, parse_allocation
from areal.config.experiment import BaseExperimentConfig, GRPOConfig
from areal.errors import CannotStart
from areal.memory_estimate import CUDA, GIB, SURELY, ModelShape
from areal_launch.doctor import memory

ASLEEP = 3 * GIB
"""Bytes that a sleeping server keeps on a GPU: CUDA's context and memory of libraries."""
_WORK = 0.12
"""Part of a server's share that is neither weights nor cache: activations and CUDA graphs."""
_FEWEST = 32
"""Fewest requests of full length that a server should hold at once; with fewer, generation is
slow."""


@dataclass(frozen=True)
class Split:
    """How one GPU is shared."""

    sharing: Sharing
    part: float
    """Share of the free memory that a server's weights and cache may take; 0: its engine
    decides."""
    why: str
    """The reasoning, in one line."""


@dataclass(frozen=True)
class Room:
    """What a server has on a GPU."""

    static: int
    """Bytes for weights and cache."""
    requests: int
    """Requests of full length that its cache holds."""


def server_room(config: BaseExperimentConfig, shape: ModelShape, free: int) -> Room:
    """Returns what a server can do with so many bytes of each of its GPUs."""
    need = memory.server(config, shape, gpu=True)
    static = free - max(2 * GIB, need.parts["process"] + int(_WORK * free))
    room = static - need.parts["weights"]
    running = config.stack.inference_max_running
    return Room(static, max(0, room * running // max(need.parts["cache"], 1)))


def fewest_requests(config: BaseExperimentConfig) -> int:
    """Returns how many requests of full length a server should hold."""
    return min(_FEWEST, config.stack.inference_max_running)


def split(config: BaseExperimentConfig, shape: ModelShape | None, free: int) -> Split:
    """Decides how servers and trainer share their GPUs.

    Args:
        config: Valid; its `allocation_mode` has `|`.
        shape: The model's sizes; None: they cannot be read yet.
        free: Free bytes of the fullest of these GPUs.

    Raises:
        CannotStart: They do not fit in the way that is asked for, or in no way.
    """
    allocation = parse_allocation(config.allocation_mode)
    wanted = allocation.sharing
    if shape is None or not isinstance(config, GRPOConfig) or not free:
        return _halves(wanted, free)
    shared = _shared(config, shape, free)
    if wanted is Sharing.SHARED and not shared.part:
        instead = replace(allocation, sharing=Sharing.ALTERNATING)
        raise CannotStart(
            f"allocation_mode {config.allocation_mode!r}: {shared.why}; take turns with "
            f"allocation_mode='{instead}', or {_ways_out(config, shape)}"
        )
    if wanted is not Sharing.ALTERNATING and shared.part:
        return shared
    turns = _alternating(config, shape, free)
    if not turns.part:
        raise CannotStart(
            f"allocation_mode {config.allocation_mode!r}: {turns.why}; {_ways_out(config, shape)}, "
            "or more GPUs"
        )
    if wanted is Sharing.FITTING:
        return replace(turns, why=f"{shared.why}, so they take turns: {turns.why}")
    return turns


def _ways_out(config: GRPOConfig, shape: ModelShape) -> str:
    *_, leanest = memory.trainer_ranks(config, shape)
    return f"{leanest.ways_out}, or a smaller model.context_length"


def _halves(wanted: Sharing, free: int) -> Split:
    """Splits the memory without an estimate: enough for the small models that recipes create."""
    sharing = Sharing.SHARED if wanted is Sharing.FITTING else wanted
    whose = "trainer and servers share each GPU" if sharing is Sharing.SHARED else "they take turns"
    part = 0.4 if sharing is Sharing.SHARED else 0.8
    sized = f"{_gib(free)} GiB are free, and " if free else ""
    return Split(
        sharing,
        part,
        f"{sized}the model's size is not known yet: {whose}, and weights and cache of a server get "
        f"{part:.0%} of it",
    )


def _shared(config: GRPOConfig, shape: ModelShape, free: int) -> Split:
    """Splits the memory for `@shared`; `part` is 0 if both do not fit."""
    best: tuple[memory.Trainer, Room] | None = None
    fewest = fewest_requests(config)
    for trainer in memory.trainer_ranks(config, shape):
        room = server_room(config, shape, free - math.ceil(trainer.need.total / SURELY))
        best = trainer, room
        # Recompute less only where the server's cache holds all requests even so.
        if room.requests >= config.stack.inference_max_running:
            break
    assert best is not None, "there is at least one mode"
    trainer, room = best
    part = math.floor(100 * room.static / free) / 100
    said = (
        f"{_gib(free)} GiB free, the trainer needs {_gib(trainer.need.total)} "
        f"(gradient_checkpointing={trainer.mode}), a server's weights "
        f"{_gib(memory.server(config, shape, gpu=True).parts['weights'])}"
    )
    if room.requests < fewest or part <= 0:
        return Split(
            Sharing.SHARED,
            0.0,
            f"{said}: both do not fit at once with room for {fewest} requests of full length",
        )
    return Split(
        Sharing.SHARED,
        part,
        f"{said}: both fit, and {part:.0%} for servers hold {_count(config, room)}",
    )


def _alternating(config: GRPOConfig, shape: ModelShape, free: int) -> Split:
    """Splits the memory for `@alternating`; `part` is 0 if one does not fit."""
    trainer = next(
        (t for t in memory.trainer_ranks(config, shape) if trainer_fits(t, free - ASLEEP)), None
    )
    if trainer is None:
        *_, leanest = memory.trainer_ranks(config, shape)
        why = (
            f"the trainer alone needs {_gib(leanest.need.total)} GiB, and {_gib(free - ASLEEP)} "
            "are free while servers sleep"
        )
        return Split(Sharing.ALTERNATING, 0.0, why)
    # The allocator's cache is emptied, but the context and libraries stay.
    room = server_room(config, shape, free - CUDA)
    part = math.floor(100 * room.static / free) / 100
    if room.requests < 1:
        why = f"no request of full length fits beside a server's weights in {_gib(free)} GiB"
        return Split(Sharing.ALTERNATING, 0.0, why)
    return Split(
        Sharing.ALTERNATING,
        part,
        f"{_gib(free)} GiB free, of which the trainer takes {_gib(trainer.need.total)} in its turn "
        f"(gradient_checkpointing={trainer.mode}); in theirs, {part:.0%} for servers hold "
        f"{_count(config, room)}",
    )


def trainer_fits(trainer: memory.Trainer, free: int) -> bool:
    """Whether a rank fits, with what an allocator leaves in pieces."""
    return trainer.need.total <= SURELY * free


def _count(config: BaseExperimentConfig, room: Room) -> str:
    running = config.stack.inference_max_running
    number = f"{room.requests}" if room.requests < running else f"all {running}"
    return f"{number} requests of full length"


def _gib(size: int) -> str:
    return f"{size / GIB:.1f}"
