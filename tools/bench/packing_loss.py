"""Packing, micro-batch splitting and the PPO loss, and AReaL's way: CPU ns per token.

    python tools/bench/packing_loss.py [--rounds 7]

The contenders are AReaL 1.0.4's code, written out here: rows padded to the longest and packed again
through the attention mask (concat_padded_tensors, pack_tensor_dict), first-fit-decreasing over a
list of bins (ffd_allocate), and the decoupled PPO loss with token-level rejection. The bench checks
that both sides compute the same. Contenders alternate; it prints medians of CPU time, one JSON line
each.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from areal_torch.algorithms import packing
from areal_torch.algorithms.behavior import behavior_weight
from areal_torch.algorithms.losses import add_up, ppo_actor_loss

KEYS = ("input_ids", "loss_mask", "behavior_logprobs", "token_versions", "rewards")


def cpu_ns(run: Callable[[], object]) -> float:
    """CPU nanoseconds of one call."""
    started = time.process_time()
    run()
    return (time.process_time() - started) * 1e9


def report(name: str, ours: Callable[[], Any], theirs: Callable[[], Any], unit: int, rounds: int):
    """Alternates the contenders and prints medians per unit."""
    ours(), theirs()
    times: dict[str, list[float]] = {"ours": [], "reference": []}
    for _ in range(rounds):
        times["reference"].append(cpu_ns(theirs))
        times["ours"].append(cpu_ns(ours))
    ns = {key: statistics.median(values) / unit for key, values in times.items()}
    row = {f"{key}_ns": round(value, 2) for key, value in ns.items()}
    print(json.dumps({"benchmark": name, **row, "ratio": round(ns["reference"] / ns["ours"], 2)}))


def pad_and_pack(sequences: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Concatenates one-row batches by padding, then packs by the attention mask."""
    longest = max(len(s["input_ids"]) for s in sequences)
    rows: dict[str, list[torch.Tensor]] = {key: [] for key in (*KEYS, "attention_mask")}
    for s in sequences:
        room = longest - len(s["input_ids"])
        whole = {**s, "attention_mask": torch.ones_like(s["loss_mask"])}
        for key, value in whole.items():
            rows[key].append(torch.nn.functional.pad(value[None], (0, room)))
    padded = {key: torch.cat(parts) for key, parts in rows.items()}
    lengths = padded["attention_mask"].sum(-1)
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    packed = {
        key: torch.cat([padded[key][i, : lengths[i]] for i in range(len(sequences))])
        for key in KEYS
    }
    return {**packed, "cu_seqlens": cu_seqlens}


def first_fit_decreasing(sizes: list[int], capacity: int) -> list[list[int]]:
    """Puts each size, largest first, into the fitting bin with the fewest members."""
    bins: list[list[int]] = []
    loads: list[int] = []
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        fitting = [b for b in range(len(bins)) if loads[b] + sizes[index] <= capacity]
        if fitting:
            chosen = min(fitting, key=lambda b: len(bins[b]))
        else:
            chosen = len(bins)
            bins.append([])
            loads.append(0)
        bins[chosen].append(index)
        loads[chosen] += sizes[index]
    return bins


def reference_loss(
    policy: torch.Tensor,
    proximal: torch.Tensor,
    behavior: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    cap: float,
) -> torch.Tensor:
    """Decoupled PPO with token-level rejection, sum over tokens."""
    log_ratio = proximal.detach().float() - behavior.detach().float()
    log_ratio = torch.where(torch.isfinite(log_ratio), log_ratio, 0.0)
    metric = torch.exp(log_ratio)
    weight = torch.exp(log_ratio)
    kept = mask.bool() & (metric <= cap)
    weight = torch.where(kept, weight, 0.0)
    ratio = torch.where(kept, torch.exp(policy - proximal), 0)
    clipped = torch.clamp(ratio, 0.8, 1.2)
    first, second = -advantages * ratio, -advantages * clipped
    clip_mask = first.detach() < second.detach()
    loss = torch.max(first, second)
    third = torch.sign(advantages) * 3.0 * advantages
    dual_mask = third.detach() < loss.detach()
    loss = torch.min(loss, third)
    kl = torch.where((weight > 0).logical_and(kept), proximal.detach() - behavior.detach(), 0.0)
    loss = loss * weight
    clip_mask.logical_and_(kept)
    dual_mask.logical_and_(kept)
    # Its statistics are reduced later; ours are part of the call, so these are summed here too.
    for stat in (ratio.detach(), (policy - proximal).detach(), kl, clip_mask, dual_mask, weight):
        stat.sum()
    return torch.where(kept, loss, 0).sum()


def main() -> None:
    """Runs the three comparisons."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    g = torch.Generator().manual_seed(0)
    # Long-tailed lengths.
    lengths = (torch.randn(256, generator=g).exp() * 300).int().clamp(8, 4096).tolist()
    sequences = [
        {
            "input_ids": torch.randint(0, 1000, (n,), generator=g),
            "loss_mask": torch.arange(n) >= n // 4,
            "behavior_logprobs": -torch.rand(n, generator=g),
            "token_versions": torch.zeros(n, dtype=torch.int64),
            "rewards": torch.zeros(n),
        }
        for n in lengths
    ]
    ours, theirs = packing.pack(sequences), pad_and_pack(sequences)
    assert all(torch.equal(ours[key], theirs[key]) for key in KEYS)
    total = sum(lengths)
    report(
        "pack (per token)",
        lambda: packing.pack(sequences),
        lambda: pad_and_pack(sequences),
        total,
        rounds,
    )
    many = torch.randint(16, 2048, (4096,), generator=g).tolist()
    batch = {
        "cu_seqlens": torch.tensor([0, *many]).cumsum(0).int(),
        "group_index": torch.arange(4096),
    }
    report(
        "micro-batches of 4096 sequences (per sequence)",
        lambda: packing.split_micro_batches(batch, 10240),
        lambda: first_fit_decreasing(many, 10240),
        4096,
        rounds,
    )
    count = 64 * 2048
    tensors = [torch.randn(count, generator=g) * 0.3 for _ in range(4)]
    mask = torch.rand(count, generator=g) < 0.7

    def step(loss_of: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        policy = tensors[0].clone().requires_grad_()
        loss_of(policy).backward()
        assert policy.grad is not None
        return policy.grad

    def our_loss(policy: torch.Tensor) -> torch.Tensor:
        _, proximal, sampled, advantages = tensors
        weight, _ = behavior_weight(proximal, sampled, mask, 2.0)
        each, stats = ppo_actor_loss(policy, proximal, advantages, mask, c_clip=3.0)
        return add_up(each, stats, mask, weight)[0]

    def their_loss(policy: torch.Tensor) -> torch.Tensor:
        return reference_loss(policy, *tensors[1:], mask, 2.0)

    torch.testing.assert_close(step(our_loss), step(their_loss))
    report(
        "PPO loss, forward and backward (per token)",
        lambda: step(our_loss),
        lambda: step(their_loss),
        count,
        rounds,
    )


if __name__ == "__main__":
    main()
