"""Advantages for any discount and lambda, and AReaL's loop: CPU ns per token of 64 x 2048.

    python tools/bench/advantages.py [--rounds 7]

The contender is the loop that AReaL 1.0.4 and verl 0.9.1 run over the time steps of padded rows
(compute_advantages, compute_gae_advantage_return). The bench checks that both compute the same
numbers. Contenders alternate; medians of CPU time are printed, and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch

from areal_torch.algorithms.advantages import gae

ROWS, COLUMNS, PROMPT = 64, 2048, 256


def padded_loop(
    rewards: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    gamma: float,
    lam: float,
) -> torch.Tensor:
    """The reference: one vector operation per time step, [rows, columns]."""
    following = torch.zeros(rewards.shape[0])
    carried = torch.zeros(rewards.shape[0])
    backwards = []
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * following - values[:, t]
        new = delta + gamma * lam * carried
        m = mask[:, t]
        following = following * (1 - m) + values[:, t] * m
        carried = carried * (1 - m) + new * m
        backwards.append(carried)
    return torch.stack(backwards[::-1], dim=1)


def cpu_seconds(run: Callable[[], object]) -> float:
    """CPU seconds of one call."""
    started = time.process_time()
    run()
    return time.process_time() - started


def main() -> None:
    """Compares at two settings."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    g = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, ROWS, COLUMNS, generator=g)
    mask = torch.ones(ROWS, COLUMNS, dtype=torch.bool)
    mask[:, :PROMPT] = False
    mask[:, 600:700] = False
    count = ROWS * COLUMNS
    cu_seqlens = torch.arange(0, count + 1, COLUMNS, dtype=torch.int32)
    flat = [x.reshape(-1) for x in (rewards, mask, values)]
    for gamma, lam in ((1.0, 1.0), (0.99, 0.95)):

        def ours(gamma: float = gamma, lam: float = lam) -> torch.Tensor:
            return gae(
                flat[0], flat[1], cu_seqlens, discount=gamma, gae_lambda=lam, values=flat[2]
            )[0]

        def theirs(gamma: float = gamma, lam: float = lam) -> torch.Tensor:
            return padded_loop(rewards, values, mask.float(), gamma, lam)

        expected = torch.where(mask, theirs(), 0.0).reshape(-1)
        torch.testing.assert_close(ours(), expected, rtol=1e-3, atol=1e-3)
        times: dict[str, list[float]] = {"ours": [], "loop": []}
        for _ in range(rounds):
            times["loop"].append(cpu_seconds(theirs))
            # One call is too short for the CPU clock.
            times["ours"].append(cpu_seconds(lambda: [ours() for _ in range(20)]) / 20)
        ns = {name: statistics.median(t) / count * 1e9 for name, t in times.items()}
        row = {
            "benchmark": "advantages",
            "discount": gamma,
            "gae_lambda": lam,
            "ours_ns_per_token": round(ns["ours"], 2),
            "loop_ns_per_token": round(ns["loop"], 1),
            "ratio": round(ns["loop"] / ns["ours"], 1),
        }
        print(json.dumps(row))


if __name__ == "__main__":
    main()
