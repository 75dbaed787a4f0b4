"""Rewards to advantages: shaping, KL penalty, generalized advantage estimation.

Everything is full length and aligned with `input_ids` (see `areal_torch.algorithms.packing`);
advantages exist on tokens with `loss_mask`; all other tokens (prompts, tool output) are skipped:
the last generated token before a tool's output is directly followed by the first one after it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from areal.config.training import PPOActorConfig
from areal.errors import InvalidInput
from areal_torch.algorithms.normalization import center_and_scale
from areal_torch.algorithms.packing import Batch, sequence_index

# Weights within a block of the scan span at most 1e200 (1e26), which float64 (float32) holds.
_MAX_LOG_WEIGHT = {torch.float64: 460.0, torch.float32: 60.0}
_BLOCK = 256


def sequence_sums(values: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Sums token values over each sequence, float64 [S]."""
    totals = torch.zeros(len(cu_seqlens), dtype=torch.float64, device=values.device)
    sums = totals[:-1]
    return sums.index_add_(0, sequence_index(cu_seqlens), values.double())


def _discounted_prefix_sums_(x: Tensor, starts: Tensor, c: float) -> Tensor:
    """B_i = x_i + c B_{i-1}, restarting at each of the ascending `starts`; may overwrite x.

    A blocked scan instead of a loop over tokens: with weights c^-j inside a block,
    B_i = c^i (sum_{j<=i} c^-j x_j), one cumulative sum. Each term that the sum adds is at least as
    large in weight as those before it, so that scaling back loses no precision; at a segment's
    start the sum so far is taken off, which leaves the rounding of the neighboring segments'
    values. What flows from block to block is the same recurrence with coefficient c^block, solved
    by recursion.
    """
    count = x.numel()
    if count == 0 or c == 0.0:
        return x
    block = min(_BLOCK, count)
    if c < 1.0:
        block = min(block, int(_MAX_LOG_WEIGHT[x.dtype] / -math.log(c)))
    if block < 2:
        # c is so small that a step back is all that the precision can see.
        previous = torch.cat([x.new_zeros(1), x[:-1]])
        previous[starts] = 0.0
        return x.add_(previous, alpha=c)
    rows = -(-count // block)
    if count % block:
        x = torch.nn.functional.pad(x, (0, rows * block - count))
    powers = (torch.arange(block, dtype=torch.float64, device=x.device) * math.log(c)).exp()
    scaled = x.view(rows, block)
    if c < 1.0:
        scaled.mul_(powers.reciprocal().to(x.dtype))
    scaled = scaled.view(-1)
    # A piece lies in one segment and one block. Blocks are summed cumulatively; at the first token
    # of each piece is added what makes the sum start at 0, or at what the previous block brings
    # into a segment that spans both.
    row_starts = torch.arange(0, count, block, device=x.device)
    pieces = torch.unique(torch.cat([starts, row_starts]))
    opens_row = pieces % block == 0
    opens_segment = torch.zeros_like(opens_row)
    opens_segment[torch.searchsorted(pieces, starts)] = True
    totals = _piece_sums(scaled, pieces).double()
    brought = torch.zeros_like(totals)
    if rows > 1:
        # B at the end of each block but the last: the same recurrence, one level up.
        last = torch.searchsorted(pieces, row_starts[1:]) - 1
        restarts = torch.nonzero(opens_segment[last] | ~opens_row[last]).flatten()
        carry = _discounted_prefix_sums_(powers[-1] * totals[last], restarts, c**block)
        crossing = opens_row & ~opens_segment
        brought[crossing] = c * carry[pieces[crossing] // block - 1]
    scaled[pieces] += torch.where(opens_row, brought, -(totals + brought).roll(1)).to(x.dtype)
    sums = scaled.view(rows, block).cumsum_(1)
    if c < 1.0:
        sums.mul_(powers.to(x.dtype))
    return sums.view(-1)[:count]


def _piece_sums(x: Tensor, starts: Tensor) -> Tensor:
    """Sums x from each of `starts` up to the next."""
    lengths = torch.diff(starts, append=starts.new_tensor([x.numel()]))
    return torch.segment_reduce(x, "sum", lengths=lengths)


def gae(
    rewards: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    *,
    discount: float,
    gae_lambda: float,
    values: Tensor | None = None,
    bootstrap_values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes generalized advantage estimates (arXiv 1506.02438) over the tokens with `loss_mask`.

    delta_t = r_t + discount * V_next - V_t; A_t = delta_t + discount * gae_lambda * A_next, where
    "next" is the next token with `loss_mask` of the same sequence.

    Args:
        rewards: float [T].
        loss_mask: bool [T].
        cu_seqlens: int [S+1].
        discount: gamma.
        gae_lambda: lambda.
        values: float [T]; `values[t]` is the value of the state before token t. None: no critic, 0
            everywhere.
        bootstrap_values: float [S]: value after the last token of a truncated sequence, 0 where it
            ended.

    Returns:
        Advantages and returns (advantages + values), [T] in the dtype of `rewards`, 0 where
        `loss_mask` is false. Accurate to about 1e-6 (float32) or 1e-14 (float64) of the largest
        partial sum within 256 loss tokens, those of neighboring sequences included: next to one
        whose rewards are 1e5 times larger, float32 is off by 1e-2. `PPOActor` passes float64.
    """
    chosen = torch.nonzero(loss_mask).flatten()
    # Loss tokens before each sequence boundary; sequences without any vanish from the scan.
    bounds = torch.searchsorted(chosen, cu_seqlens.long())
    used = bounds.diff() > 0
    # The scan runs backwards in time: from here on index 0 is the last loss token of the last
    # sequence.
    chosen = chosen.flip(0)
    starts = (len(chosen) - bounds[1:][used]).flip(0)
    deltas = rewards.index_select(0, chosen)
    v = None
    if values is not None:
        v = values.index_select(0, chosen).to(deltas.dtype)
        following = torch.empty_like(v)
        following[1:] = v[:-1]
        following[starts] = (
            0.0 if bootstrap_values is None else bootstrap_values[used].flip(0).to(v.dtype)
        )
        deltas.add_(following, alpha=discount).sub_(v)
    compact = _discounted_prefix_sums_(deltas, starts, discount * gae_lambda)
    advantages = torch.zeros_like(rewards).index_copy_(0, chosen, compact)
    if v is None:
        return advantages, advantages.clone()
    returns = torch.zeros_like(rewards)
    return advantages, returns.index_copy_(0, chosen, compact.add_(v))


def overlong_penalty(
    response_lengths: Tensor, overlong_tokens: int, max_response_tokens: int, factor: float
) -> Tensor:
    """Returns DAPO's soft length penalty (arXiv 2503.14476, equation 13), float64 [S], <= 0.

    0 up to max_response_tokens - overlong_tokens, then linear down to -factor at
    max_response_tokens, and -factor beyond (AReaL's keeps falling there). Lengths are generated
    tokens: over all turns of a sequence they may exceed max_response_tokens.
    """
    excess = response_lengths.double() - (max_response_tokens - overlong_tokens)
    return -factor * (excess / overlong_tokens).clamp(0.0, 1.0)


def shape_scores(
    batch: Batch, config: PPOActorConfig, process_group: Any = None
) -> tuple[Tensor, Tensor]:
    """Turns token rewards into one shaped score per sequence.

    The order is AReaL's: overlong penalty, (reward + bias) * scaling, clip, normalization; then 0
    for truncated sequences if `mask_no_eos_with_zero`.

    Args:
        batch: Needs rewards, loss_mask, cu_seqlens, group_index (and truncated for
            `mask_no_eos_with_zero`).
        config: The reward_* and overlong_* fields.
        process_group: Data-parallel group for batch-level normalization, or None.

    Returns:
        Shaped scores, and their slopes: what a reward added to a sequence, all others and the
        centers and deviations of the normalization being held, adds to its score. 0 where the
        score is clipped or zeroed. Float64 [S] each.

    Raises:
        InvalidInput: `mask_no_eos_with_zero` without `truncated` in the batch.
    """
    scores = sequence_sums(batch["rewards"], batch["cu_seqlens"])
    if config.overlong_tokens:
        lengths = sequence_sums(batch["loss_mask"], batch["cu_seqlens"])
        scores = scores + overlong_penalty(
            lengths,
            config.overlong_tokens,
            config.max_response_tokens,
            config.overlong_penalty_factor,
        )
    scores = (scores + config.reward_bias) * config.reward_scaling
    slopes = torch.where(scores.abs() > config.reward_clip, 0.0, config.reward_scaling).double()
    scores = scores.clamp(-config.reward_clip, config.reward_clip)
    if config.reward_norm is not None:
        center, scale = center_and_scale(
            scores, batch["group_index"], config.reward_norm, process_group
        )
        scores, slopes = (scores - center) / scale, slopes / scale
    if config.mask_no_eos_with_zero:
        if "truncated" not in batch:
            raise InvalidInput(
                "mask_no_eos_with_zero=True: expected batch['truncated'] (bool [S]), "
                f"the batch has {sorted(batch)}"
            )
        scores = torch.where(batch["truncated"], 0.0, scores)
        slopes = torch.where(batch["truncated"], 0.0, slopes)
    return scores, slopes


def place_scores(
    rewards: Tensor, loss_mask: Tensor, cu_seqlens: Tensor, scores: Tensor, slopes: Tensor
) -> Tensor:
    """Returns token rewards whose sum over each sequence is its shaped score.

    Rewards before the last generated token (process rewards) keep their place and are scaled as
    the score was; the last generated token takes the rest. Without discount, a token's advantage
    is then the same increasing function of its raw reward-to-go at every place of a sequence: were
    process rewards left at their raw size beside a normalized score, the tokens after one could
    get the opposite sign. A single outcome becomes exactly the score; a clipped or zeroed score
    stands at the last token alone. Where tool tokens end a sequence, the last generated token still
    takes the outcome (AReaL loses it). Sequences without loss tokens get none.

    Args:
        rewards: float [T].
        loss_mask: bool [T].
        cu_seqlens: int [S+1].
        scores: float64 [S], and
        slopes: float64 [S], of `shape_scores`.

    Returns:
        Float64 [T].
    """
    positions = torch.arange(len(rewards), device=rewards.device)
    last = torch.full((len(scores),), -1, dtype=torch.int64, device=rewards.device)
    owner = sequence_index(cu_seqlens)
    last.scatter_reduce_(0, owner, torch.where(loss_mask, positions, -1), "amax")
    used = last >= 0
    placed = torch.where(loss_mask, rewards.double() * slopes[owner], 0.0)
    placed[last[used]] = 0.0
    rest = scores - sequence_sums(placed, cu_seqlens)
    placed[last[used]] = rest[used]
    return placed
