"""Trains for hours with a tiny model, and prints how memory, files and Redis grow with each step.

    make soak HOURS=2 [ARGS='--json FILE --every 30 OVERRIDE...']

A run of examples/arithmetic_grpo.py with small batches is sampled until the time is over, and then
interrupted. Slopes are fitted over the second half of the samples, because caches and pools fill in
the first. The exit code is 1 if a process grows by more than 1 MiB in 1,000 steps, by more than
three standard errors; a short run cannot tell.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "arithmetic_grpo.py"
MIB = 2**20
MOST_MIB = 1.0
"""Growth of a process in 1,000 steps."""
_FEW = 3
"""Fewest samples on either side of a jump."""
_MOST_ALIKE = 0.98
"""Highest correlation of the noise of one sample with that of the next."""
SMALL = (
    *("experiment_name=soak", "trial_name=soak", "total_train_steps=10000000"),
    *("allocation_mode=sglang:d1+fsdp:d1", "train_dataset.batch_size=4", "gconfig.n_samples=2"),
    *("heldout_problems=10", "train_problems=400", "warm_start_steps=1", "tracker=tensorboard"),
)
START_S, STOP_S = 900.0, 180.0


@dataclass(frozen=True)
class Slope:
    """How a figure grows."""

    first: float
    last: float
    per_1000: float
    """Growth per 1,000 steps, fitted over the second half."""
    error: float
    """The standard error of `per_1000`, for noise in which each sample resembles the one before;
    infinite for fewer than three samples."""


def slope(steps: Sequence[float], values: Sequence[float]) -> Slope:
    """Fits the second half of the samples by least squares; both have at least one value.

    One jump is allowed for if it explains most of what a line does not: an allocator keeps tens of
    MiB from one moment on. Growth is what repeats.
    """
    half = len(steps) // 2
    x, y = steps[half:], values[half:]
    count, free = len(x), 2
    found, spread, rest = _fit(x, y, 0)
    jumps = [_fit(x, y, at) for at in range(_FEW, count - _FEW + 1)]
    best = min(jumps, key=lambda fit: _squares(fit[2]), default=(found, spread, rest))
    if 2 * _squares(best[2]) < _squares(rest):
        (found, spread, rest), free = best, 3
    if not spread or count <= free:
        return Slope(values[0], values[-1], 1000 * found, math.inf)
    error = math.sqrt(_squares(rest) / (count - free) / spread)
    if error:
        # Samples that resemble the one before say less than independent ones (the usual
        # correction for noise of first order).
        alike = sum(one * next_ for one, next_ in itertools.pairwise(rest)) / _squares(rest)
        alike = min(max(alike, 0.0), _MOST_ALIKE)
        error *= math.sqrt((1 + alike) / (1 - alike))
    return Slope(values[0], values[-1], 1000 * found, 1000 * error)


def _fit(x: Sequence[float], y: Sequence[float], at: int) -> tuple[float, float, list[float]]:
    """Slope, spread of x and residuals of a line that jumps at one sample (0: nowhere)."""
    along, up = [*_centered(x[:at]), *_centered(x[at:])], [*_centered(y[:at]), *_centered(y[at:])]
    spread = _squares(along)
    found = sum(a * b for a, b in zip(along, up, strict=True)) / spread if spread else 0.0
    return found, spread, [b - found * a for a, b in zip(along, up, strict=True)]


def _centered(values: Sequence[float]) -> list[float]:
    mean = sum(values) / len(values) if values else 0.0
    return [each - mean for each in values]


def _squares(values: Sequence[float]) -> float:
    return sum(each**2 for each in values)


def growing(slopes: Mapping[str, Slope]) -> list[str]:
    """Names of processes that certainly grow by more than `MOST_MIB` in 1,000 steps."""
    return [
        name
        for name, each in slopes.items()
        if name.startswith("memory/") and each.per_1000 - 3 * each.error > MOST_MIB
    ]


def table(slopes: Mapping[str, Slope]) -> str:
    """The slopes as lines for people."""
    lines = [f"{'':32}{'first':>12}{'last':>12}{'per 1,000 steps':>18}{'±':>10}"]
    for name, each in sorted(slopes.items()):
        error = f"{each.error:.3f}" if math.isfinite(each.error) else "?"
        lines.append(
            f"{name:32}{each.first:12.2f}{each.last:12.2f}{each.per_1000:18.3f}{error:>10}"
        )
    return "\n".join(lines)


def _memory(process: psutil.Process) -> float:
    """MiB of its own: without pages of files.

    Those of libraries belong to one process or to several, as other programs come and go: with
    torch, 40 MiB come and go.
    """
    info = process.memory_info()
    return float(info.rss - getattr(info, "shared", 0)) / MIB


def _of_process(name: str, pid: int) -> dict[str, float]:
    """Memory, files and threads of a process and its children; empty when it has gone."""
    try:
        leader = psutil.Process(pid)
        family = [leader, *leader.children(recursive=True)]
    except psutil.Error:
        return {}
    found = {f"memory/{name} MiB": 0.0, f"files/{name}": 0.0, f"threads/{name}": 0.0}
    for each in family:
        try:
            memory, files, threads = _memory(each), each.num_fds(), each.num_threads()
        except psutil.Error:
            continue
        found[f"memory/{name} MiB"] += memory
        found[f"files/{name}"] += files
        found[f"threads/{name}"] += threads
    return found


def _redis(url: str, password: str) -> dict[str, float]:
    import redis

    with redis.Redis.from_url(url, password=password or None, socket_timeout=20) as client:
        return {"redis/used MiB": int(client.info("memory")["used_memory"]) / MIB}


def _size(file: Path) -> int:
    try:
        return file.stat().st_size if file.is_file() else 0
    except OSError:  # deleted since it was listed
        return 0


def _folders(run_dir: Path) -> dict[str, float]:
    found: dict[str, float] = {}
    for each in run_dir.iterdir():
        inner = [Path(place, name) for place, _, names in os.walk(each) for name in names]
        found[f"disk/{each.name} MiB"] = sum(map(_size, [each, *inner])) / MIB
    return found


def sample(run_dir: Path, redis_url: str, password: str) -> dict[str, float]:
    """Everything that may grow, by name; `step` is how far the run is."""
    stack = json.loads((run_dir / "stack.json").read_text("utf-8"))
    pids = {name: each["pid"] for name, each in stack["processes"].items() if each["pid"]}
    pids["launcher"] = stack["launcher"]["pid"]
    found = {"step": float(_steps(run_dir / "metrics.jsonl"))}
    for name, pid in pids.items():
        # The launcher's children have names of their own.
        mine = _of_process(name, pid) if name != "launcher" else _alone(pid)
        found |= mine
    found |= _redis(redis_url, password)
    return found | _folders(run_dir)


def _alone(pid: int) -> dict[str, float]:
    try:
        process = psutil.Process(pid)
        memory, files = _memory(process), process.num_fds()
    except psutil.Error:
        return {}
    return {"memory/launcher MiB": memory, "files/launcher": float(files)}


def _steps(metrics: Path) -> int:
    """The last step of metrics.jsonl; reads only its end."""
    if not metrics.exists():
        return 0
    with metrics.open("rb") as file:
        file.seek(max(0, metrics.stat().st_size - 65536))
        lines = file.read().split(b"\n")
    for line in reversed(lines[:-1]):
        try:
            return int(json.loads(line)["step"])
        except (ValueError, KeyError):
            continue
    return 0


def run(folder: Path, seconds: float, every_s: float, overrides: Sequence[str]) -> list[dict]:
    """Trains for `seconds` once the first step is done; returns the samples."""
    argv = [sys.executable, "-m", "areal_launch.cli", "run", str(EXAMPLE), "--json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "services")}
    run_dir, log = folder / "runs" / "soak" / "soak", folder / "launcher.out"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*argv, *SMALL, *overrides], cwd=folder, env=environment, stdout=output, stderr=output
        )
    try:
        _wait_for_steps(process, run_dir, log)
        end, samples, store = time.monotonic() + seconds, [], _store(run_dir)
        while (rest := end - time.monotonic()) > 0:
            samples.append({"time": time.time(), **sample(run_dir, *store)})
            _wait(process, min(every_s, rest), log)
        return samples
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()


def _store(run_dir: Path) -> tuple[str, str]:
    """URL and password of the run's Redis."""
    from areal.config.experiment import load_service_config
    from areal.security import Security

    config = load_service_config(run_dir / "config.yaml")
    return config.endpoints.redis, Security.load(config.security).redis_password


def _wait_for_steps(process: subprocess.Popen[bytes], run_dir: Path, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while not _steps(run_dir / "metrics.jsonl"):
        if time.monotonic() > deadline:
            sys.exit(f"waited {START_S:.0f} s for the first step; see {log}")
        _wait(process, 1.0, log)


def _wait(process: subprocess.Popen[bytes], seconds: float, log: Path) -> None:
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        return
    said = log.read_text("utf-8", errors="replace")[-2000:]
    sys.exit(f"the run ended by itself with code {code}: {said}")


def slopes_of(samples: Sequence[Mapping[str, float]]) -> dict[str, Slope]:
    """A slope for each figure that all samples of the second half have."""
    names = set.intersection(*(set(each) for each in samples[len(samples) // 2 :]))
    found: dict[str, Slope] = {}
    for name in names - {"step", "time"}:
        having = [each for each in samples if name in each]
        found[name] = slope([each["step"] for each in having], [each[name] for each in having])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--every", type=float, default=30.0, help="seconds between samples")
    parser.add_argument("--json", type=Path, help="file for samples and slopes")
    parser.add_argument("--folder", type=Path, help="keep the run here")
    parser.add_argument("overrides", nargs="*", help="configuration values of the run")
    asked = parser.parse_args()
    if asked.hours <= 0 or asked.every <= 0:
        parser.error("--hours and --every: expected numbers above 0")
    with tempfile.TemporaryDirectory(prefix="areal-soak-") as name:
        folder = asked.folder or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        samples = run(folder, 3600 * asked.hours, asked.every, asked.overrides)
    slopes = slopes_of(samples)
    steps = samples[-1]["step"] - samples[0]["step"]
    grown = growing(slopes)
    if asked.json:
        content = {
            "steps": steps,
            "hours": asked.hours,
            "growing": grown,
            "slopes": {
                name: [e.first, e.last, e.per_1000, e.error if math.isfinite(e.error) else None]
                for name, e in slopes.items()
            },
            "samples": samples,
        }
        asked.json.write_text(json.dumps(content) + "\n", "utf-8")
    print(f"{steps:.0f} steps in {asked.hours:g} h, {len(samples)} samples\n{table(slopes)}")
    for each in grown:
        print(f"{each}: grows by more than {MOST_MIB:g} MiB in 1,000 steps")
    return 1 if grown else 0


if __name__ == "__main__":
    sys.exit(main())
