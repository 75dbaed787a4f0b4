"""What keeping rollouts costs: steps/s of the demo with them and with `checkpoint.rollouts_gib=0`.

    python tools/bench/kept_rollouts.py [--steps 60] [--repeat 5]

The contenders are the same command, `areal run examples/arithmetic_grpo.py` (64 groups of 8 samples
per step). They take turns, and each round begins with the other contender, so a machine whose speed
drifts favors neither. The cost is the median over the rounds of `1 - kept / not kept`; it is
expected to be below 3 %. Medians are printed as a table and as one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

WARM_UP_STEPS = 10
EXPECTED_COST = 0.03
CONTENDERS = {"kept": [], "not kept": ["checkpoint.rollouts_gib=0"]}


@dataclass
class Outcome:
    """One run."""

    steps_per_s: float
    cpu_s_per_step: float
    """CPU of all processes, their start included."""
    kib_per_step: float
    """Bytes of its kept rollouts, in KiB."""


def run(folder: Path, trial: str, steps: int, overrides: list[str]) -> Outcome:
    """One `areal run`."""
    before = os.times()
    done = subprocess.run(
        [
            *(sys.executable, "-m", "areal_launch.cli", "run"),
            *(str(ROOT / "examples" / "arithmetic_grpo.py"), "--json"),
            *("experiment_name=kept", f"trial_name={trial}", f"total_train_steps={steps}"),
            *("heldout_problems=10", *overrides),
        ],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT / "services"), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        check=False,
    )
    run_dir = folder / "runs" / "kept" / trial
    if done.returncode:
        raise SystemExit(f"kept_rollouts: `areal run` failed; see {run_dir}/logs")
    after = os.times()
    cpu = sum(after[2:4]) - sum(before[2:4])  # of children that have ended, and of theirs
    files = [*(run_dir / "rollouts").glob("step-*-rank*.parquet")]
    expected = 0 if overrides else steps
    if len(files) != expected:
        raise SystemExit(f"kept_rollouts: {len(files)} files are kept, expected {expected}")
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    rows: list[dict[str, Any]] = [json.loads(line) for line in lines][WARM_UP_STEPS:]
    return Outcome(
        steps_per_s=len(rows) / (rows[-1]["time"] - rows[0]["time"] + rows[0]["time/step"]),
        cpu_s_per_step=cpu / steps,
        kib_per_step=sum(file.stat().st_size for file in files) / 1024 / steps,
    )


def measure(steps: int, repeat: int, folder: Path) -> dict[str, list[Outcome]]:
    """Alternates the contenders; the first of a round is the second of the next."""
    outcomes: dict[str, list[Outcome]] = {name: [] for name in CONTENDERS}
    for number in range(repeat):
        names = list(CONTENDERS) if number % 2 == 0 else list(CONTENDERS)[::-1]
        for name in names:
            trial = f"{name.replace(' ', '-')}-{number}"
            outcomes[name].append(run(folder, trial, steps, CONTENDERS[name]))
            print(f"{name:10s} {outcomes[name][-1]}", file=sys.stderr, flush=True)
    return outcomes


def main() -> int:
    """Prints the table and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--repeat", type=int, default=5)
    arguments = parser.parse_args()
    if arguments.steps <= WARM_UP_STEPS + 1 or arguments.repeat < 1:
        parser.error(f"--steps: expected above {WARM_UP_STEPS + 1}; --repeat: expected 1 or more")
    with tempfile.TemporaryDirectory() as folder:
        outcomes = measure(arguments.steps, arguments.repeat, Path(folder))
    rounds = zip(outcomes["kept"], outcomes["not kept"], strict=True)
    costs = [1 - kept.steps_per_s / without.steps_per_s for kept, without in rounds]
    found = {
        name: {
            field: round(statistics.median(getattr(each, field) for each in runs), 4)
            for field in Outcome.__dataclass_fields__
        }
        for name, runs in outcomes.items()
    }
    print(f"{'':10s} {'steps/s':>8s} {'CPU s a step':>13s} {'KiB a step':>11s}")
    for name, row in found.items():
        print(
            f"{name:10s} {row['steps_per_s']:8.2f} {row['cpu_s_per_step']:13.3f} "
            f"{row['kib_per_step']:11.0f}"
        )
    cost = statistics.median(costs)
    print(f"cost: {cost:.1%} of steps/s (rounds: {', '.join(f'{each:.1%}' for each in costs)})")
    print(
        json.dumps(
            {
                "bench": "kept_rollouts",
                "cost": round(cost, 4),
                "costs": [round(each, 4) for each in costs],
                "expected": EXPECTED_COST,
                "load": round(os.getloadavg()[0], 1),
                **found,
            }
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
