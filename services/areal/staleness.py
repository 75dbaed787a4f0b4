"""The staleness rules as pure formulas; the ledger's Lua states the same ones.

Versions count finished train steps. The batch of step s is consumed by a trainer at version
s - 1. B is the groups per step, eta the bound `max_head_offpolicyness`. AReaL (2025), eq. 3,
bounds accepted + running <= (eta + version + 1) * B; the ledger's form below needs no cumulative
counter, so rejections, cancellations and recovery cannot leave it wrong.
"""

from __future__ import annotations


def staleness(step: int, head_version: int) -> int:
    """Versions between the oldest token of a group and the trainer that consumes it at `step`."""
    return step - 1 - head_version


def oldest_admissible_version(step: int, max_head_offpolicyness: int) -> int:
    """The smallest head version that the batch of `step` may hold (may be negative: any)."""
    return step - 1 - max_head_offpolicyness


def admission_headroom(
    *,
    batch_size: int,
    max_head_offpolicyness: int,
    running: int,
    completed: int,
    batched_ahead: int,
) -> int:
    """Groups that may still start so that none of them can become too stale by waiting.

    Args:
        batch_size: B.
        max_head_offpolicyness: eta.
        running: Groups being generated.
        completed: Groups waiting for a batch.
        batched_ahead: Groups in batches of steps above the current version.

    Returns:
        (eta + 1) * B - (running + completed + batched_ahead); negative when over the bound.
    """
    return (max_head_offpolicyness + 1) * batch_size - (running + completed + batched_ahead)
