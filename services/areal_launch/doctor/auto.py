"""`allocation_mode=auto`: which GPUs serve and which train, from GPUs, memory and the model's size.

one GPU ───────────────────────────────────────────────┐
more: trainer on half, else on more ── none of it fits ─┴─> the same GPUs: `sharing.split`
│ fits, and servers fit on the rest
v
sglang:dNtM+fsdp:dK
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from areal.config.allocation import Sharing, of_ranks
from areal.config.experiment import BaseExperimentConfig, GRPOConfig
from areal.errors import CannotStart
from areal.memory_estimate import GIB, ModelShape
from areal_launch.clusters.base import servers_on_gpus
from areal_launch.doctor import memory
from areal_launch.doctor.sharing import fewest_requests, server_room, split, trainer_fits

_WIDTHS = (1, 2, 4, 8)
"""Numbers of GPUs that one server may have."""


@dataclass(frozen=True)
class Choice:
    """What to put in place of `auto`."""

    allocation_mode: str
    why: str
    """The reasoning, in one line."""


def choose(config: BaseExperimentConfig, shape: ModelShape | None, free: Sequence[int]) -> Choice:
    """Returns an allocation of all GPUs.

    Args:
        config: Valid.
        shape: The model's sizes; None: they cannot be read yet.
        free: Free bytes of each GPU; 0: not known. Empty: servers and trainer compute on CPUs.

    Raises:
        CannotStart: The model fits in no way.
    """
    if not free:
        return Choice(str(of_ranks(1)), "no GPUs (stack.gpus_per_node=0), so one CPU engine")
    count, least = len(free), min(free)
    there = f"{count} GPU{'s' * (count > 1)} with {least / GIB:.1f} GiB free"
    if not servers_on_gpus(config):
        mode = str(of_ranks(_most_ranks(config, count)))
        return Choice(mode, f"{there}, which all train, because the servers use none of them")
    if shape is None or not least or not isinstance(config, GRPOConfig):
        if count == 1:
            mode = str(of_ranks(1, sharing=Sharing.FITTING))
            return Choice(mode, f"{there}: servers and trainer share it")
        train = _most_ranks(config, count // 2)
        mode = str(of_ranks(train, count - train))
        return Choice(mode, f"{there}, the model's size is not known yet: half of them serve")
    for mode in _apart(config, count):
        tried = replace(config, allocation_mode=mode)
        rank = next((t for t in memory.trainer_ranks(tried, shape) if trainer_fits(t, least)), None)
        room = server_room(tried, shape, least)
        if rank is not None and room.requests >= fewest_requests(config):
            why = (
                f"{there}: a rank needs {rank.need.total / GIB:.1f} "
                f"(gradient_checkpointing={rank.mode}), a server holds {room.requests} requests "
                "of full length"
            )
            return Choice(mode, why)
    refused: CannotStart | None = None
    for width in _WIDTHS:
        if count % width or _most_ranks(config, count) < count:
            continue
        mode = str(of_ranks(count, count // width, width, Sharing.FITTING))
        try:
            return Choice(
                mode, f"{there}: {split(replace(config, allocation_mode=mode), shape, least).why}"
            )
        except CannotStart as error:
            refused = refused or error
    said = str(refused).partition(": ")[2] or "no trainer rank and server fit"
    raise CannotStart(f"allocation_mode 'auto': {there}: {said}")


def _apart(config: GRPOConfig, count: int) -> Iterator[str]:
    """Allocations in which each has GPUs of its own, the preferred first.

    Generation and training take about as long with half of the GPUs each. More ranks need less
    memory each, more servers generate more.
    """
    half = _most_ranks(config, count // 2)
    for ranks in range(half, _most_ranks(config, count - 1) + 1) if half else ():
        for width in _WIDTHS:
            servers, left = divmod(count - ranks, width)
            if servers and not left:
                yield str(of_ranks(ranks, servers, width))


def _most_ranks(config: BaseExperimentConfig, count: int) -> int:
    """Returns at most as many ranks as a batch has groups."""
    groups = config.train_dataset.batch_size if isinstance(config, GRPOConfig) else count
    return min(count, groups)
