"""What keeping rollouts costs: steps/s of the demo while it keeps them, and while it does not.

    python tools/bench/kept_rollouts.py [--steps 700]

One run of examples/arithmetic_grpo.py (64 groups of 8 samples a step) takes turns: it keeps the
rollouts of BLOCK steps, then none for as many. Runs differ from each other by more than the 3 %
that keeping may cost, neighboring blocks of one run by less. A block's first step is left out,
because files of the block before are still written during it. The cost of a pair of blocks is
`1 - time without / time with`; the median of all pairs and its standard error are printed, and one
JSON line.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "arithmetic_grpo.py"

BLOCK = 7  # no divisor of checkpoint.freq_steps, so checkpoints fall on both kinds of blocks
EXPECTED_COST = 0.03
# Appended to the example. The trainer runs it in its own process; no other service has a writer.
TURNS = f"""
from areal.runs.rollouts.writer import RolloutWriter
_keep = RolloutWriter.keep
def _keep_in_turns(self, groups, *, step, **named):
    if step // {BLOCK} % 2 == 0 or not groups:
        _keep(self, groups, step=step, **named)
RolloutWriter.keep = _keep_in_turns
"""


def run(folder: Path, steps: int) -> list[dict[str, Any]]:
    """The rows of one run's metrics.jsonl; they have `kept` besides."""
    recipe = folder / EXAMPLE.name
    recipe.write_text(EXAMPLE.read_text() + TURNS)
    shutil.copy(EXAMPLE.with_suffix(".yaml"), folder)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "areal_launch.cli", "run", str(recipe), "--json"),
            *("experiment_name=kept", "trial_name=turns", f"total_train_steps={steps}"),
            "heldout_problems=10",
        ],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT / "services"), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        check=False,
    )
    run_dir = folder / "runs" / "kept" / "turns"
    if done.returncode:
        raise SystemExit(f"kept_rollouts: `areal run` failed; see {run_dir}/logs")
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    rows: list[dict[str, Any]] = [json.loads(line) for line in lines]
    for row in rows:
        row["kept"] = (run_dir / "rollouts" / f"step-{row['step']:08}-rank0.parquet").exists()
        if row["kept"] != (row["step"] // BLOCK % 2 == 0):
            raise SystemExit(f"kept_rollouts: step {row['step']}: kept is {row['kept']}")
    return rows


def block_times(rows: list[dict[str, Any]]) -> list[tuple[bool, float]]:
    """Whether a block kept its rollouts, its seconds per step; two for warm-up are left out."""
    times = {row["step"]: row["time"] for row in rows}
    kept = {row["step"]: row["kept"] for row in rows}
    starts = range(2 * BLOCK, max(times) - BLOCK + 1, BLOCK)
    return [
        (kept[start], (times[start + BLOCK - 1] - times[start]) / (BLOCK - 1)) for start in starts
    ]


def main() -> int:
    """Prints the figures and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=700)
    arguments = parser.parse_args()
    if arguments.steps < 10 * BLOCK:
        parser.error(f"--steps: expected {10 * BLOCK} or more, got {arguments.steps}")
    with tempfile.TemporaryDirectory() as folder:
        blocks = block_times(run(Path(folder), arguments.steps))
    costs = []
    for (first_kept, first), (_, second) in pairwise(blocks):
        with_files, without = (first, second) if first_kept else (second, first)
        costs.append(1 - without / with_files)
    cost = statistics.median(costs)
    # Each block is in two pairs, and a median scatters 1.25 times as much as a mean.
    error = 1.25 * statistics.stdev(costs) / math.sqrt(len(costs) / 2)
    per_s = {
        name: 1 / statistics.median(seconds for was_kept, seconds in blocks if was_kept == kept)
        for name, kept in (("kept", True), ("not kept", False))
    }
    for name, value in per_s.items():
        print(f"{name:10s} {value:.2f} steps/s")
    print(f"cost: {cost:.1%} of steps/s, standard error {error:.1%}, {len(costs)} pairs")
    print(
        json.dumps(
            {
                "bench": "kept_rollouts",
                "cost": round(cost, 4),
                "error": round(error, 4),
                "pairs": len(costs),
                "expected": EXPECTED_COST,
                "load": round(os.getloadavg()[0], 1),
                **{name: round(value, 3) for name, value in per_s.items()},
            }
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
