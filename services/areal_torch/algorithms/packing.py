"""The packed batch: many sequences end to end, no padding, one rank's share.

A batch is a plain `dict[str, torch.Tensor]`:

    cu_seqlens         int32 [S+1]   sequence s is tokens cu_seqlens[s] to cu_seqlens[s+1] - 1
    group_index        int64 [S]     group of each sequence; a group is never split across ranks
    truncated          bool  [S]     optional: true if the sequence was cut off
    bootstrap_values   f32   [S]     optional: the value after a truncated sequence's last token
    input_ids          int64 [T]     token ids
    loss_mask          bool  [T]     true on tokens that the loss covers
    behavior_logprobs  f32   [T]     logprob of token t when it was sampled; 0 if it was not
    token_versions     int64 [T]     policy version that sampled token t; -1 if none did
    rewards            f32   [T]     a whole sequence's reward is on its last sampled token
    proximal_logprobs, reference_logprobs, advantages, returns, values   f32 [T], added later
    teacher_ids        int64 [T, k]  optional: a teacher's k most likely ids for position t
    teacher_logprobs   f32   [T, k]  optional: logprobs of `teacher_ids` under the teacher
    routed_experts     int16 [T, layers, k]  optional: the experts that the server chose for token
                                     t; -1: not known
    chosen             bool  [S]     optional: true on the preferred sequence of a pair; a pair
                                     is a group and stays in one micro-batch
    pixel_values, image_grid_thw, image_group    optional: see `areal_torch.algorithms.images`

A recipe may add keys of its own, for its loss, its advantages or its head: [T, ...], one entry per
token, or, under a name that begins with `sequence_`, [S, ...], one per sequence.

Index t always describes token t itself: a logprob at t is log p(token t | tokens < t), and it is
0 at a sequence's first token. Arrays are never shifted: the model wrapper itself computes the
logprob of token t from the hidden state of token t - 1.

Example:
    >>> from areal_torch.algorithms.packing import pack
    >>> first = {"input_ids": [5, 6, 7], "loss_mask": [False, True, True]}
    >>> second = {"input_ids": [8, 9], "loss_mask": [False, True]}
    >>> batch = pack([first, second], group_index=[0, 1])
    >>> batch["cu_seqlens"].tolist(), batch["input_ids"].tolist()
    ([0, 3, 5], [5, 6, 7, 8, 9])
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from areal.errors import InvalidInput
from areal.types import StopReason, Trajectory, TrajectoryGroup
from areal_torch.algorithms import images

Batch = dict[str, Tensor]

ROUTES = "routed_experts"
"""Key of the experts that the server chose, which the policy's forward passes replay."""

SEQUENCE_KEYS = frozenset({"group_index", "truncated", "bootstrap_values", "chosen"})
"""Keys with one entry per sequence; those that begin with `sequence_` have one as well. All others
except `cu_seqlens` have one entry per token."""

_KEYS_OF_TOKENS = frozenset(
    {"input_ids", "loss_mask", "behavior_logprobs", "token_versions", "rewards"}
    | {"proximal_logprobs", "reference_logprobs", "advantages", "returns", "values"}
    | {"loss_weights", "kept"}
)
"""Keys with a single value per token."""


def of_sequence(key: str) -> bool:
    """Whether a key has one entry per sequence."""
    return key in SEQUENCE_KEYS or key.startswith("sequence_")


_DTYPES = {
    "input_ids": torch.int64,
    "loss_mask": torch.bool,
    "token_versions": torch.int64,
    "group_index": torch.int64,
    "truncated": torch.bool,
    "teacher_ids": torch.int64,
    ROUTES: torch.int16,
}
_TRAJECTORY_KEYS = ("input_ids", "loss_mask", "behavior_logprobs", "token_versions", "rewards")


def sequence_lengths(batch: Batch) -> Tensor:
    """Returns the number of tokens of each sequence, int64 [S]."""
    return batch["cu_seqlens"].diff().long()


def sequence_index(cu_seqlens: Tensor) -> Tensor:
    """Returns the sequence that each token belongs to, int64 [T]."""
    lengths = cu_seqlens.diff().long()
    count = torch.arange(len(lengths), device=cu_seqlens.device)
    return torch.repeat_interleave(count, lengths)


def position_ids(cu_seqlens: Tensor) -> Tensor:
    """Returns each token's offset in its own sequence, int64 [T]."""
    total = int(cu_seqlens[-1])
    starts = torch.repeat_interleave(cu_seqlens[:-1].long(), cu_seqlens.diff().long())
    return torch.arange(total, device=cu_seqlens.device) - starts


def pack(sequences: Sequence[Mapping[str, Any]], group_index: Sequence[int] | None = None) -> Batch:
    """Joins sequences into one batch.

    Args:
        sequences: Each maps token keys to 1-D tensors or lists of one length; all have the same
            keys.
        group_index: Group of each sequence; default: each sequence is a group of its own.

    Raises:
        InvalidInput: No sequences, differing keys, or differing lengths within a sequence.
    """
    if not sequences:
        raise InvalidInput("sequences=[]: expected at least one sequence to pack")
    if group_index is None:
        group_index = range(len(sequences))
    if len(group_index) != len(sequences):
        raise InvalidInput(
            f"group_index has {len(group_index)} entries: "
            f"expected {len(sequences)}, one per sequence"
        )
    keys = sequences[0].keys()
    for number, sequence in enumerate(sequences):
        if sequence.keys() != keys:
            raise InvalidInput(
                f"sequences[{number}] has keys {sorted(sequence)}: expected {sorted(keys)}, "
                "the keys of sequences[0]"
            )
        lengths = {key: len(value) for key, value in sequence.items()}
        if len(set(lengths.values())) != 1:
            raise InvalidInput(f"sequences[{number}] has lengths {lengths}: expected equal lengths")
    batch: Batch = {}
    for key in keys:
        batch[key] = torch.cat([torch.as_tensor(s[key], dtype=_DTYPES.get(key)) for s in sequences])
        if key not in _DTYPES and batch[key].dtype != torch.float64:
            batch[key] = batch[key].float()
    counts = torch.tensor([0] + [len(s["input_ids"]) for s in sequences], dtype=torch.int64)
    batch["cu_seqlens"] = counts.cumsum(0).to(torch.int32)
    batch["group_index"] = torch.as_tensor(list(group_index), dtype=torch.int64)
    return batch


def unpack(batch: Batch) -> list[dict[str, Tensor]]:
    """Splits a batch into its sequences: the inverse of `pack` (views; only keys of tokens)."""
    sizes = sequence_lengths(batch).tolist()
    other = images.IMAGE_KEYS | {"cu_seqlens"}
    keys = [key for key in batch if key not in other and not of_sequence(key)]
    columns = [torch.split(batch[key], sizes) for key in keys]
    return [dict(zip(keys, row, strict=True)) for row in zip(*columns, strict=True)]


def pack_groups(groups: Sequence[TrajectoryGroup]) -> Batch:
    """Joins groups into one packed batch of tensors.

    An empty share (more ranks than groups) gives an empty batch: the engine still takes part in
    every collective.
    """
    trajectories = [each for group in groups for each in group.trajectories]
    if not trajectories:
        return _empty_batch()
    # One tensor a key: one for each array of each trajectory cost the trainer 20 ms a step.
    lengths = [0, *(len(each.input_ids) for each in trajectories)]
    batch: Batch = {
        key: torch.from_numpy(np.concatenate([getattr(each, key) for each in trajectories])).to(
            _DTYPES.get(key, torch.float32)
        )
        for key in _TRAJECTORY_KEYS
    }
    counts = [len(group.trajectories) for group in groups]
    batch["cu_seqlens"] = torch.tensor(lengths).cumsum(0).to(torch.int32)
    batch["group_index"] = torch.arange(len(groups)).repeat_interleave(torch.tensor(counts))
    batch["truncated"] = torch.tensor(
        [each.finish_reason in {StopReason.LENGTH, StopReason.ABORT} for each in trajectories]
    )
    routes = _routes(trajectories, int(batch["cu_seqlens"][-1]))
    return batch if routes is None else {**batch, ROUTES: routes}


def _routes(trajectories: Sequence[Trajectory], total: int) -> Tensor | None:
    """The experts of each token, int16 [total, layers, k], -1 where they are not known."""
    having = [each.routed_experts for each in trajectories if each.routed_experts is not None]
    if not having:
        return None
    # Widened before the copy: int16 has room for -1 and for 32767 experts.
    routes = np.full((total, *having[0].shape[1:]), -1, dtype=np.int16)
    start = 0
    for each in trajectories:
        known = each.routed_experts
        if known is not None and known.shape[1:] == routes.shape[1:]:
            routes[start : start + len(known)] = known
        start += len(each.input_ids)
    return torch.from_numpy(routes)


def _empty_batch() -> Batch:
    return {
        "cu_seqlens": torch.zeros(1, dtype=torch.int32),
        "group_index": torch.zeros(0, dtype=torch.int64),
        "truncated": torch.zeros(0, dtype=torch.bool),
        "input_ids": torch.zeros(0, dtype=torch.int64),
        "loss_mask": torch.zeros(0, dtype=torch.bool),
        "behavior_logprobs": torch.zeros(0),
        "token_versions": torch.zeros(0, dtype=torch.int64),
        "rewards": torch.zeros(0),
    }


def check_batch(batch: Batch) -> None:
    """Checks the shapes of a batch.

    Raises:
        InvalidInput: A required key is missing, or a tensor's length contradicts `cu_seqlens`; the
            message names the key, its shape and the expected one.
    """
    for key in ("cu_seqlens", "group_index", "input_ids", "loss_mask"):
        if key not in batch:
            raise InvalidInput(f"batch has no {key!r}: it has {sorted(batch)}")
    cu_seqlens = batch["cu_seqlens"]
    if cu_seqlens.ndim != 1 or len(cu_seqlens) < 1 or int(cu_seqlens[0]) != 0:
        raise InvalidInput(
            f"batch['cu_seqlens'] has shape {tuple(cu_seqlens.shape)}: "
            "expected [S+1], starting with 0"
        )
    if len(cu_seqlens) > 1 and int(cu_seqlens.diff().min()) <= 0:
        raise InvalidInput("batch['cu_seqlens'] is not increasing: expected no empty sequence")
    sizes = {True: len(cu_seqlens) - 1, False: int(cu_seqlens[-1])}
    images.check_images(batch)
    for key, value in batch.items():
        if key in images.IMAGE_KEYS:
            continue
        if not isinstance(value, Tensor):
            raise InvalidInput(f"batch[{key!r}] is {type(value).__name__}: expected a tensor")
        expected = sizes[of_sequence(key)]
        single = key in _KEYS_OF_TOKENS or key in SEQUENCE_KEYS
        shape = value.shape if single else value.shape[:1]
        if key != "cu_seqlens" and tuple(shape) != (expected,):
            raise InvalidInput(
                f"batch[{key!r}] has shape {tuple(value.shape)}: expected [{expected}]"
            )
    starts = cu_seqlens[:-1].long()
    if bool(batch["loss_mask"][starts].any()):
        raise InvalidInput(
            "batch['loss_mask'] is true on a sequence's first token: "
            "expected false, because no token precedes it"
        )


def token_index(batch: Batch, indices: Sequence[int]) -> Tensor:
    """Returns the positions of the tokens of the given sequences, in the given order, int64."""
    device = batch["cu_seqlens"].device
    chosen = torch.as_tensor(list(indices), dtype=torch.int64, device=device)
    lengths = sequence_lengths(batch)[chosen]
    ends = lengths.cumsum(0)
    total = int(ends[-1]) if len(ends) else 0
    shift = batch["cu_seqlens"][:-1].long()[chosen] - (ends - lengths)
    return torch.arange(total, device=device) + torch.repeat_interleave(shift, lengths)


def select(batch: Batch, indices: Sequence[int]) -> Batch:
    """Returns the batch of the given sequences, in the given order (a copy)."""
    chosen = torch.as_tensor(list(indices), dtype=torch.int64, device=batch["cu_seqlens"].device)
    tokens = token_index(batch, indices)
    result = {
        key: value[chosen] if of_sequence(key) else value[tokens]
        for key, value in batch.items()
        if key != "cu_seqlens" and key not in images.IMAGE_KEYS
    }
    result |= images.of_groups(batch, result["group_index"])
    ends = sequence_lengths(batch)[chosen].cumsum(0)
    result["cu_seqlens"] = torch.cat([ends.new_zeros(1), ends]).to(torch.int32)
    return result


def dummy_like(batch: Batch) -> Batch:
    """Returns one two-token sequence of zeros with the keys of `batch`.

    A rank with fewer micro-batches than the others runs it with weight 0, so that all ranks take
    part in the same collectives.
    """
    result = {
        key: value.new_zeros(1 if of_sequence(key) else 2, *value.shape[1:])
        for key, value in batch.items()
        if key != "cu_seqlens" and key not in images.IMAGE_KEYS
    }
    result["cu_seqlens"] = batch["cu_seqlens"].new_tensor([0, 2])
    result["loss_mask"][1] = True
    return result


def cost(lengths: Sequence[int], pair_cost: float) -> float:
    """Returns the cost of computing sequences, in tokens.

    Args:
        lengths: Tokens of each sequence.
        pair_cost: Attention cost of a pair of tokens in one sequence, divided by the other cost of
            a token; about 1 / (12 x hidden size).
    """
    return sum(length + pair_cost * length * length for length in lengths)


def assign_groups(lengths: Sequence[float], world_size: int) -> list[list[int]]:
    """Deals groups to ranks so that their costs are balanced (longest processing time first).

    Args:
        lengths: Tokens of each group, or its `cost`.
        world_size: Number of ranks.

    Returns:
        For each rank the ascending indices of its groups. Deterministic: every rank computes the
        same answer.
    """
    ranks: list[list[int]] = [[] for _ in range(world_size)]
    # Equal loads go to the rank with fewer groups, then to the lower rank.
    heap = [(0.0, 0, rank) for rank in range(world_size)]
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        load, count, rank = heap[0]
        ranks[rank].append(index)
        heapq.heapreplace(heap, (load + lengths[index], count + 1, rank))
    return [sorted(chosen) for chosen in ranks]


def group_units(batch: Batch) -> list[list[int]]:
    """Returns runs of neighboring sequences that belong to one group."""
    groups = enumerate(batch["group_index"].tolist())
    return [[index for index, _ in run] for _, run in groupby(groups, key=lambda item: item[1])]


def split_minibatches(batch: Batch, count: int) -> list[list[int]]:
    """Deals the groups of a batch into `count` minibatches balanced by tokens.

    Returns:
        For each minibatch the ascending indices of its sequences. A batch with fewer groups than
        `count` is dealt by sequence; with fewer sequences some minibatches are empty.
    """
    units = group_units(batch)
    if len(units) < count:
        units = [[index] for unit in units for index in unit]
    lengths = sequence_lengths(batch).tolist()
    dealt = assign_groups([sum(lengths[i] for i in unit) for unit in units], count)
    return [[index for number in chosen for index in units[number]] for chosen in dealt]


def split_micro_batches(
    batch: Batch, max_tokens: int, min_count: int = 1, pair_cost: float = 0.0
) -> list[list[int]]:
    """Cuts a batch into micro-batches of at most `max_tokens` tokens (best fit, longest first).

    Groups stay together where they fit, so that their common prefixes are computed once. Where
    that makes fewer micro-batches than `min_count`, the largest is split until there are enough:
    no micro-batch grows, so the budget holds. Then the sequences are dealt again to the same number
    of micro-batches with balanced costs, if such a deal fits the budget.

    Args:
        batch: The batch.
        max_tokens: Token budget; a longer sequence, or pair, forms a micro-batch of its own.
        min_count: Smallest number of micro-batches (fewer only if there are fewer sequences, or
            with pairs, which are not split further).
        pair_cost: See `cost`.

    Returns:
        For each micro-batch the ascending indices of its sequences; deterministic, none empty. The
        costliest comes first: ranks wait for each other after each one, so similar costs should
        meet.
    """
    lengths = sequence_lengths(batch).tolist()
    units = []
    paired = "chosen" in batch  # a loss of both: they are never parted
    for unit in group_units(batch):
        fits = paired or sum(lengths[i] for i in unit) <= max_tokens
        units.extend([unit] if fits else [[i] for i in unit])
    sizes = [sum(lengths[i] for i in unit) for unit in units]
    costs = [cost([lengths[i] for i in unit], pair_cost) for unit in units]
    dealt = _best_fit_decreasing(sizes, max_tokens)
    dealt = _balance(sizes, costs, len(dealt), max_tokens) or dealt
    bins = [[units[n] for n in chosen] for chosen in dealt]
    if not paired:
        bins = _split_largest(bins, lengths, min(min_count, len(lengths)))
    result = [sorted(i for unit in chosen for i in unit) for chosen in bins]
    return sorted(result, key=lambda chosen: -cost([lengths[i] for i in chosen], pair_cost))


def _balance(
    sizes: Sequence[int], costs: Sequence[float], count: int, capacity: int
) -> list[list[int]] | None:
    """Deals the costliest first, each to the cheapest bin with room; None: one found no room.

    One that is larger than the capacity takes a bin of its own, and the others share the rest.
    """
    alone = [[index] for index, size in enumerate(sizes) if size >= capacity]
    bins: list[list[int]] = []
    heap = [(0.0, number) for number in range(count - len(alone))]
    bins.extend([] for _ in heap)
    room = [capacity] * len(bins)
    rest = [index for index, size in enumerate(sizes) if size < capacity]
    smallest = min(sizes, default=0)
    for index in sorted(rest, key=lambda i: (-costs[i], i)):
        full = []
        while heap and room[heap[0][1]] < sizes[index]:
            full.append(heapq.heappop(heap))
        if not heap:
            return None
        spent, number = heapq.heappop(heap)
        bins[number].append(index)
        room[number] -= sizes[index]
        for entry in [*full, (spent + costs[index], number)]:
            if room[entry[1]] >= smallest:
                heapq.heappush(heap, entry)
    return alone + bins


def _split_largest(
    bins: list[list[list[int]]], lengths: Sequence[int], count: int
) -> list[list[list[int]]]:
    """Halves the largest bin of several sequences until there are `count` bins.

    A bin is a list of units (runs of sequences); one of a single unit is split inside it.
    """

    def entry(chosen: list[list[int]], number: int) -> tuple[int, int, list[list[int]]]:
        return -sum(lengths[i] for unit in chosen for i in unit), number, chosen

    several = [entry(b, n) for n, b in enumerate(bins) if sum(map(len, b)) > 1]
    done = [chosen for chosen in bins if sum(map(len, chosen)) == 1]
    heapq.heapify(several)
    number = len(bins)
    while several and len(several) + len(done) < count:
        _, _, chosen = heapq.heappop(several)
        units = chosen if len(chosen) > 1 else [[i] for i in chosen[0]]
        for half in assign_groups([sum(lengths[i] for i in unit) for unit in units], 2):
            part = [units[n] for n in half]
            if sum(map(len, part)) == 1:
                done.append(part)
            else:
                heapq.heappush(several, entry(part, number))
                number += 1
    return [chosen for _, _, chosen in sorted(several)] + done


def _best_fit_decreasing(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    bins: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (free tokens, bin), ascending
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        place = bisect_left(free, (sizes[index], -1))
        if place < len(free):
            room, chosen = free.pop(place)
        else:
            room, chosen = capacity, len(bins)
            bins.append([])
        bins[chosen].append(index)
        insort(free, (room - sizes[index], chosen))
    return bins
