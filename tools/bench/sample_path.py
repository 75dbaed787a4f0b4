"""CPU per train step of every process of the demo: what the path of a sample costs.

    python tools/bench/sample_path.py                    # a table, then one JSON line
    python tools/bench/sample_path.py --base v0.2.0      # this tree and a commit, alternating
    python tools/bench/sample_path.py --steps 80 --repeat 3

Each contender is `areal run examples/arithmetic_grpo.py`: 64 problems x 8 answers per step, with a
model so small that most of the time is spent outside it. CPU is user and system time of a process
and its children, from the WARM_UP-th step to the last but one, divided by the number of steps.
Figures are medians of the runs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
WARM_UP = 10
_POLL_S = 0.05
_START_S = 600.0


def cpu_seconds(run_dir: Path) -> dict[str, float]:
    """CPU so far, by kind of process: "inference" is all servers, "launcher" the command itself."""
    stack = json.loads((run_dir / "stack.json").read_text())
    found: dict[str, float] = defaultdict(float)
    for name, process in stack["processes"].items():
        found[name.rstrip("0123456789-")] += _with_children(process["pid"])
    return dict(found)


def _with_children(pid: int) -> float:
    try:
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0.0
    total = 0.0
    for each in family:
        try:
            times = each.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


def run(tree: Path, folder: Path, model: Path, trial: str, steps: int) -> dict[str, float]:
    """One `areal run`: milliseconds of CPU per step by process, "all", and "wall"."""
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "areal_launch.cli", "run"),
            *(str(tree / "examples" / "arithmetic_grpo.py"), "--json", f"trial_name={trial}"),
            *(f"total_train_steps={steps}", f"model.path={model}", "heldout_problems=10"),
        ],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(tree / "services"), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
    )
    run_dir = folder / "runs" / "arithmetic" / trial
    metrics = run_dir / "metrics.jsonl"
    marks: list[tuple[int, float, dict[str, float]]] = []
    deadline = time.monotonic() + _START_S
    try:
        for wanted in (WARM_UP, steps - 1):
            while (done := _rows(metrics)) < wanted:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"sample_path: step {wanted} was not reached; see {run_dir}")
                time.sleep(_POLL_S)
            marks.append((done, time.monotonic(), cpu_seconds(run_dir)))
        if process.wait(_START_S):
            raise SystemExit(f"sample_path: `areal run` failed; see {run_dir}/logs")
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(60)
    (first, since, before), (last, until, after) = marks
    each = 1000 / (last - first)
    spent = {name: each * (after[name] - before.get(name, 0.0)) for name in after}
    return {**spent, "all": sum(spent.values()), "wall": each * (until - since)}


def _rows(metrics: Path) -> int:
    return len(metrics.read_bytes().splitlines()) if metrics.exists() else 0


def measure(
    trees: dict[str, Path], steps: int, repeat: int, folder: Path
) -> dict[str, dict[str, float]]:
    """Medians of alternating runs; the first run of all makes the model."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
    for number in range(repeat):
        for name, tree in trees.items():
            one = run(tree, folder, folder / "model", f"{name}{number}", steps)
            found[name].append(one)
            text = ", ".join(f"{key} {value:.0f}" for key, value in one.items())
            print(f"{name:5s} {text}", file=sys.stderr, flush=True)
    return {
        name: {key: statistics.median(one[key] for one in ones) for key in ones[0]}
        for name, ones in found.items()
    }


def main() -> int:
    """Prints the table and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", default="", help="a commit to compare with")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--repeat", type=int, default=3)
    arguments = parser.parse_args()
    git = ["git", "-C", str(ROOT), "worktree"]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        trees = {"here": ROOT}
        if arguments.base:
            trees = {"base": folder / "tree", **trees}
            subprocess.run(
                [*git, "add", "--quiet", "--detach", str(trees["base"]), arguments.base], check=True
            )
        try:
            found = measure(trees, arguments.steps, arguments.repeat, folder)
        finally:
            if arguments.base:
                subprocess.run([*git, "remove", "--force", str(trees["base"])], check=True)
    _show(found)
    return 0


def _show(found: dict[str, dict[str, float]]) -> None:
    names: dict[str, Any] = dict.fromkeys(key for row in found.values() for key in row)
    print(f"{'ms of CPU per step':20s}" + "".join(f"{name:>8s}" for name in found))
    for key in sorted(names, key=lambda key: (key in {"all", "wall"}, -found["here"].get(key, 0))):
        print(f"{key:20s}" + "".join(f"{row.get(key, 0.0):8.0f}" for row in found.values()))
    rounded = {n: {k: round(v, 1) for k, v in row.items()} for n, row in found.items()}
    line: dict[str, Any] = {"bench": "sample_path", **rounded}
    if "base" in found:
        line["ratio"] = round(found["here"]["all"] / found["base"]["all"], 3)
        print(f"here / base: {line['ratio']:.2f}")
    print(json.dumps(line))


if __name__ == "__main__":
    sys.exit(main())
