"""The policy losses that `actor.loss_type` names. Importing this module loads no torch.

Each entry points at a function of `areal_torch.algorithms.losses`, which has the same form as a
loss of a recipe (`FSDPPPOActor(config.actor, loss=my_loss)`). `actor.loss_type`, the presets, the
help texts and docs/algorithms.md read this table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from areal.errors import ConfigError, nearest


@dataclass(frozen=True)
class BuiltinLoss:
    """One loss: its function, what it does, and the constants that only it has."""

    function: str
    """Name in `areal_torch.algorithms.losses`."""
    meaning: str
    constants: Mapping[str, float] = field(default_factory=dict)
    """Keyword arguments of the function that `actor.loss_constants` may set, with their defaults.
    `eps_clip`, `eps_clip_higher` and `c_clip` are keys of `actor` instead, because several losses
    have them."""


LOSSES: dict[str, BuiltinLoss] = {
    "ppo": BuiltinLoss("ppo_actor_loss", "clips the ratio of each token"),
    "gspo": BuiltinLoss("gspo_loss", "clips the ratio of each sequence"),
    "cispo": BuiltinLoss("cispo_loss", "uses the clipped ratio as a weight without gradient"),
    "sapo": BuiltinLoss(
        "sapo_loss",
        "uses a soft gate on the ratio instead of a clip",
        {"tau_positive": 1.0, "tau_negative": 1.05},
    ),
}

if TYPE_CHECKING:
    LossType = str
else:
    LossType = Literal[tuple(LOSSES)]


def check_constants(loss_type: str, constants: Mapping[str, float]) -> None:
    """Raises ConfigError for a constant that the loss does not have."""
    known = LOSSES[loss_type].constants
    for name in constants:
        if name not in known:
            none = f" ({loss_type} has no constants of its own)" if not known else ""
            raise ConfigError(
                f"actor.loss_constants {name!r}: unknown constant of loss_type "
                f"{loss_type}{nearest(name, known)}{none}"
            )
