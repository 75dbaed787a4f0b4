"""Does following the recommended number of servers converge, and does it stay there?

    python tools/autoscaling_simulation.py [--seeds 20] [--plot autoscaling.png]

A training with noisy steps, an autoscaler that looks every 15 s, servers that take a minute to
start and a moment to drain, and four worlds: too few servers, too many, answers that grow threefold
and shrink again in the middle, and generation whose longest answer no server makes shorter. The
recommender is the service's own.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from rich.console import Console
from rich.table import Table

from areal_rollout.autoscaling import TARGET, Recommender, Sample


@dataclass(frozen=True)
class World:
    """Generation takes `work` server-seconds a step, and never less than `latency_s`."""

    name: str
    start: int
    work: tuple[tuple[float, float], ...] = ((0.0, 68.0),)
    """(from second, server-seconds per step)."""
    train_s: float = 10.0
    latency_s: float = 0.0
    noise: float = 0.15
    """Standard deviation of the logarithm of each step's work."""

    def work_at(self, now: float) -> float:
        """Server-seconds a step then."""
        return [work for since, work in self.work if since <= now][-1]

    def best_at(self, now: float) -> float:
        """Servers with which generation takes `TARGET` of the training time."""
        return self.work_at(now) / (TARGET * self.train_s - self.latency_s)


WORLDS = (
    World("too few", 1),
    World("too many", 40),
    World("answers grow, then shrink", 8, ((0.0, 68.0), (1800.0, 204.0), (5400.0, 68.0))),
    World("long stragglers", 2, latency_s=4.0),
    World("fast and noisy steps", 3, ((0.0, 6.8),), train_s=1.0, noise=0.4),
)


@dataclass
class Result:
    """Servers over time, and what is asked of it."""

    world: World
    servers: list[tuple[float, int]] = field(default_factory=list)
    turns: int = 0
    """Changes of direction after the first, except those that the change of work requires."""
    settled_s: float = 0.0
    """Seconds after the last change of work until the number stayed within a quarter (or one) of
    the best number."""
    last: int = 0
    steps: int = 0


def simulate(world: World, seed: int, seconds: float = 7200.0) -> Result:
    """Two hours of training under an autoscaler that does what it is told."""
    rng = random.Random(seed)
    recommender, result = Recommender(), Result(world)
    servers, arriving = world.start, []  # arriving: (when it serves)
    now = generating = training = trained = 0.0
    next_look, next_sample = 15.0, 5.0
    left_work, left_train = 0.0, 0.0
    ready = 0  # generated batches that wait, at most two ahead
    step_began, worked, latency = 0.0, 0.0, 0.0
    dt = 0.1
    while now < seconds:
        now += dt
        for at in [at for at in arriving if at <= now]:
            arriving.remove(at)
            servers += 1
        if left_work <= 0 and ready < 2:
            factor = rng.lognormvariate(0.0, world.noise)
            left_work = world.work_at(now) * factor
            latency = world.latency_s
        if left_work > 0 or latency > 0:
            generating += dt
            if latency > 0:
                latency -= dt
            else:
                left_work -= servers * dt
            if left_work <= 0 and latency <= 0:
                ready += 1
        if left_train <= 0 and ready:
            ready -= 1
            left_train = world.train_s * rng.lognormvariate(0.0, world.noise / 3)
        if left_train > 0:
            left_train -= dt
            worked += dt
            if left_train <= 0:  # totals move when a step's row is written, as in the service
                training, trained = training + worked, trained + now - step_began
                step_began, worked = now, 0.0
                result.steps += 1
        if now >= next_sample:
            next_sample += 5.0
            recommender.observe(Sample(now, servers, generating, training, trained))
        if now >= next_look:
            next_look += 15.0
            wanted = recommender.recommended or servers
            total = servers + len(arriving)
            if wanted > total:
                arriving += [now + 60.0 + rng.uniform(0.0, 5.0) for _ in range(wanted - total)]
            elif wanted < total:
                for _ in range(min(len(arriving), total - wanted)):
                    arriving.pop()
                servers = min(servers, wanted)
            result.servers.append((now, servers + len(arriving)))
    _judge(result, seconds)
    return result


def _judge(result: Result, seconds: float) -> None:
    counts = [count for _, count in result.servers]
    moves = [b - a for a, b in pairwise(counts) if a != b]
    turns = sum(a * b < 0 for a, b in pairwise(moves))
    result.turns = max(0, turns - (len(result.world.work) - 1))
    result.last = counts[-1]
    since = result.world.work[-1][0]
    bad = [
        at
        for at, count in result.servers
        if at >= since and abs(count - (best := result.world.best_at(at))) > max(1.5, 0.3 * best)
    ]
    result.settled_s = (bad[-1] if bad else since) - since


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--plot", type=Path, help="a PNG of seed 0")
    options = parser.parse_args()
    table = Table(title=f"two hours, {options.seeds} seeds: median (worst)")
    for column in ("world", "best", "ends with", "settled after", "turns"):
        table.add_column(column, justify="left" if column == "world" else "right")
    for world in WORLDS:
        results = [simulate(world, seed) for seed in range(options.seeds)]
        ends = sorted(r.last for r in results)
        settled = sorted(r.settled_s for r in results)
        turns = sorted(r.turns for r in results)
        middle = len(results) // 2
        table.add_row(
            world.name,
            f"{world.best_at(7200.0):.1f}",
            f"{ends[middle]} ({ends[0]} to {ends[-1]})",
            f"{settled[middle]:.0f} s ({settled[-1]:.0f} s)",
            f"{turns[middle]} ({turns[-1]})",
        )
    Console(width=110).print(table)
    if options.plot:
        plot(options.plot)


def plot(file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(WORLDS), 1, figsize=(9, 2.2 * len(WORLDS)), sharex=True)
    for axis, world in zip(axes, WORLDS, strict=True):
        times, counts = zip(*simulate(world, 0).servers, strict=True)
        axis.step(times, counts, where="post", label="servers")
        axis.plot(times, [world.best_at(at) for at in times], "--", label="best")
        axis.set_title(world.name, loc="left", fontsize=9)
        axis.set_ylim(bottom=0)
    axes[0].legend(fontsize=8)
    axes[-1].set_xlabel("seconds")
    figure.tight_layout()
    figure.savefig(file, dpi=110)


if __name__ == "__main__":
    main()
