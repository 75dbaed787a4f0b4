"""Steps per second of asynchronous training, compared with synchronous training.

    python tools/bench/asynchrony.py [--steps 60] [--repeat 3] [--tailed]

Both contenders run `areal run examples/arithmetic_grpo.py`: one with the file's
`max_head_offpolicyness`, one with 0. They alternate on this machine, and medians are printed as a
table and as one JSON line. With `--tailed`, answers of a random model have geometric lengths
(mean 65, at most 512), so a synchronous step waits for its longest answer.

While the trainer trains, the servers' token counters are read every 50 ms. "sampling" is the share
of training time in which the counters increased.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from areal.clients.trainer import TrainerClient
from areal.config.experiment import load_service_config
from areal.errors import ArealError
from areal.security import Security

ROOT = Path(__file__).resolve().parents[2]

POLL_S = 0.05
WARM_UP_STEPS = 10
_TOKENS = re.compile(r"^sglang:generation_tokens\S*\s+(\S+)", re.MULTILINE)


@dataclass
class Outcome:
    """What one run measured."""

    steps_per_s: float
    sampling: float
    staleness_max: float
    wait_share: float


async def watch_sampling(run_dir: Path, ended: asyncio.Event) -> float:
    """The share of training time in which tokens were sampled."""
    stack = run_dir / "stack.json"
    while not (stack.exists() and json.loads(stack.read_text())["state"] == "ready"):
        if ended.is_set():
            return float("nan")
        await asyncio.sleep(POLL_S)
    processes = json.loads(stack.read_text())["processes"]
    servers = [p["address"] for name, p in processes.items() if name.startswith("inference")]
    security = Security.load(load_service_config(run_dir / "config.yaml").security)
    trainer = TrainerClient(processes["trainer"]["address"], security)
    timeout = aiohttp.ClientTimeout(total=2.0)
    sampling = training = 0.0
    before, since = None, time.monotonic()
    async with aiohttp.ClientSession(timeout=timeout, headers=security.headers()) as http:

        async def tokens(address: str) -> float:
            async with http.get(f"http://{address}/metrics") as reply:
                found = _TOKENS.search(await reply.text())
                return float(found[1]) if found else 0.0

        while not ended.is_set():
            await asyncio.sleep(POLL_S)
            try:
                status = await trainer.get_status(after_step=1 << 60)
                total = sum(await asyncio.gather(*[tokens(address) for address in servers]))
            except (ArealError, aiohttp.ClientError, TimeoutError):
                before = None
                continue
            now = time.monotonic()
            if before is not None and status.state == "training" and status.step >= WARM_UP_STEPS:
                training += now - since
                sampling += (now - since) * (total > before)
            before, since = total, now
    await trainer.close()
    return sampling / training if training else float("nan")


async def run(recipe: Path, folder: Path, trial: str, steps: int, overrides: list[str]) -> Outcome:
    """One `areal run`, watched."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "areal_launch.cli", "run"),
        *(
            str(recipe),
            "--json",
            "experiment_name=asynchrony",
            f"trial_name={trial}",
            f"total_train_steps={steps}",
            *overrides,
        ),
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT / "services"), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
    )
    run_dir = folder / "runs" / "asynchrony" / trial
    ended = asyncio.Event()
    watcher = asyncio.create_task(watch_sampling(run_dir, ended))
    if await process.wait():
        raise SystemExit(f"asynchrony: `areal run` failed; see {run_dir}/logs")
    ended.set()
    sampling = await watcher
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    rows: list[dict[str, Any]] = [json.loads(line) for line in lines][WARM_UP_STEPS:]
    seconds = sum(row["time/step"] for row in rows)
    return Outcome(
        steps_per_s=len(rows) / (rows[-1]["time"] - rows[0]["time"] + rows[0]["time/step"]),
        sampling=sampling,
        staleness_max=max(row["staleness/max"] for row in rows),
        wait_share=sum(row["time/wait"] for row in rows) / seconds,
    )


async def measure(
    steps: int, repeat: int, servers: int, tailed: bool, folder: Path
) -> dict[str, Any]:
    """Lets the contenders take turns."""
    base = [f"allocation_mode=sglang:d{servers}+fsdp:d1"]
    recipe = ROOT / "examples" / "arithmetic_grpo.py"
    if tailed:
        from end_to_end import tiny_model

        recipe = ROOT / "tools" / "bench" / "peers" / "arithmetic_grpo.py"
        base += [
            f"model.path={tiny_model(folder / 'model', tailed=True)}",
            "model.context_length=544",
        ]
        base += ["gconfig.max_new_tokens=512"]
    else:
        base += ["heldout_problems=10"]
    contenders = {"asynchronous": [], "synchronous": ["rollout.max_head_offpolicyness=0"]}
    outcomes: dict[str, list[Outcome]] = {name: [] for name in contenders}
    for number in range(repeat):
        for name, overrides in contenders.items():
            outcome = await run(recipe, folder, f"{name}{number}", steps, [*base, *overrides])
            outcomes[name].append(outcome)
            print(f"{name:14s} {outcome}", file=sys.stderr, flush=True)
    return {
        name: {
            field: round(statistics.median(getattr(o, field) for o in found), 4)
            for field in Outcome.__dataclass_fields__
        }
        for name, found in outcomes.items()
    }


def main() -> int:
    """Prints the table and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--tailed", action="store_true", help="answers with long-tailed lengths")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(
            measure(
                arguments.steps,
                arguments.repeat,
                arguments.servers,
                arguments.tailed,
                Path(folder),
            )
        )
    ratio = found["asynchronous"]["steps_per_s"] / found["synchronous"]["steps_per_s"]
    print(f"{'':14s} {'steps/s':>8s} {'sampling':>9s} {'waiting':>8s} {'staleness':>9s}")
    for name, row in found.items():
        print(
            f"{name:14s} {row['steps_per_s']:8.2f} {row['sampling']:9.0%} {row['wait_share']:8.0%} "
            f"{row['staleness_max']:9.0f}"
        )
    print(f"asynchronous / synchronous: {ratio:.2f}")
    print(
        json.dumps(
            {"bench": "asynchrony", "tailed": arguments.tailed, "ratio": round(ratio, 3), **found}
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
