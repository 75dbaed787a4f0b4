"""GRPO end to end against TRL: generation, rewards and updates of the same task on the same cores.

    python tools/bench/end_to_end.py --trl VENV/bin/python [--rounds 3] [--steps 12]

Both train a 0.6 M parameter Qwen2 with random weights on two-digit addition: the same rows, 64
problems x 8 answers a step, learning rate and loss. Ours is `areal run` with two servers, TRL one
process with `--threads` threads (1.16; its environment is that of tools/bench/trainer.py). They
alternate. `uniform`: exactly 16 tokens; `tailed`: 4 of 261 tokens end an answer, so its length is
geometric with a mean of 65, 512 at most. With `--model` both begin with that model (the demo's)
and the task's own lengths (`learning`): the last line but one then has reward over time.

Steps are timed from the WARM_UP-th on. A JSON line for each run has wall and CPU milliseconds a
sample, tokens a sample, and (seconds, reward) of each step; the last line has the ratios of the
medians, TRL's over ours.
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
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
GROUPS, SAMPLES, WARM_UP = 64, 8, 3
CASES = {"uniform": 16, "tailed": 512, "learning": 8}
STOPS = [260, 0, 1, 2]
LEARNING_RATE = 3e-4


def run_trl(case: str, model: Path, steps: int, threads: int) -> None:
    """TRL's GRPOTrainer on the rows; a line of JSON after each step."""
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from areal.datasets.arithmetic import addition

    torch.set_num_threads(threads)
    rows, _ = addition(2, train=6000, heldout=500, seed=0)
    step: dict[str, float] = {}

    def reward(completions: list[Any], answer: list[str], completion_ids: list[Any], **_: Any):
        texts = [each[0]["content"] for each in completions]
        rewards = [
            float(text.strip().lstrip("0") == a) for text, a in zip(texts, answer, strict=True)
        ]
        step["reward"] = sum(rewards) / len(rewards)
        step["tokens"] = sum(map(len, completion_ids)) / len(rewards)
        return rewards

    class Report(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            times = os.times()
            line = {"time": time.time(), "cpu": times.user + times.system, **step}
            print("STEP " + json.dumps(line), flush=True)

    length = CASES[case]
    GRPOTrainer(
        model=str(model),
        reward_funcs=reward,
        args=GRPOConfig(
            output_dir=str(model / "trl"),
            per_device_train_batch_size=GROUPS * SAMPLES,
            num_generations=SAMPLES,
            max_completion_length=length,
            generation_kwargs={"min_new_tokens": length} if case == "uniform" else None,
            learning_rate=LEARNING_RATE,
            adam_beta2=0.95,
            epsilon_high=0.28,
            beta=0.0,
            max_steps=steps,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            model_init_kwargs={"dtype": "float32"},
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list(
            [{"prompt": row["messages"], "answer": row["answer"]} for row in rows]
        ),
        callbacks=[Report()],
    ).train()


def theirs(python: str, case: str, model: Path, steps: int, threads: int) -> list[dict[str, float]]:
    """The steps of a run of TRL."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    environment["PYTHONPATH"] = str(REPOSITORY / "services")
    command = [python, __file__, "--contender", case, "--model", str(model)]
    command += ["--steps", str(steps), "--threads", str(threads)]
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=True)
    return [json.loads(line[5:]) for line in ran.stdout.splitlines() if line.startswith("STEP ")]


def ours(case: str, model: Path, steps: int, folder: Path, trial: str) -> list[dict[str, float]]:
    """The steps of an `areal run`; CPU is that of all its processes."""
    from sample_path import cpu_seconds

    length = CASES[case]
    recipe = Path(__file__).parent / "peers" / "arithmetic_grpo.py"
    command = [sys.executable, "-m", "areal_launch.cli", "run", str(recipe), "--json"]
    command += [f"trial_name={trial}", f"total_train_steps={steps}", f"model.path={model}"]
    command += [f"gconfig.max_new_tokens={length}", f"model.context_length={length + 32}"]
    command += [f"whole_length={str(case == 'uniform').lower()}"]
    command += [f"actor.optimizer.lr={LEARNING_RATE}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = str(REPOSITORY / "services")
    process = subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL)
    run_dir = folder / "runs" / "end-to-end" / trial
    metrics, cpu = run_dir / "metrics.jsonl", {}
    try:
        while process.poll() is None:
            done = len(metrics.read_bytes().splitlines()) if metrics.exists() else 0
            if done < steps and done not in cpu and done:
                cpu[done] = sum(cpu_seconds(run_dir).values())
            time.sleep(0.05)
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait(120)
    if process.returncode:
        raise SystemExit(f"end_to_end: `areal run` failed; see {run_dir}/logs")
    found = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [
        {
            "time": row["time"],
            "cpu": cpu.get(row["step"], 0.0),
            "reward": row["reward_mean"],
            "tokens": row["response_tokens"],
        }
        for row in found
    ]


def summary(case: str, name: str, steps: list[dict[str, float]]) -> dict[str, Any]:
    """One run: from the WARM_UP-th step to the last one whose CPU is known."""
    timed = [step for step in steps[WARM_UP - 1 :] if step["cpu"]]
    first, last = timed[0], timed[-1]
    samples = GROUPS * SAMPLES * (steps.index(last) - steps.index(first))
    curve = [(round(s["time"] - steps[0]["time"], 2), round(s["reward"], 3)) for s in steps]
    return {
        "case": case,
        "contender": name,
        "wall": round(1000 * (last["time"] - first["time"]) / samples, 3),
        "cpu": round(1000 * (last["cpu"] - first["cpu"]) / samples, 3),
        "tokens": round(statistics.mean(s["tokens"] for s in steps), 1),
        "curve": curve,
    }


def main() -> None:
    """Run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trl", help="python of an environment with TRL")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--threads", type=int, default=2, help="of TRL's process")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=["uniform", "tailed"])
    parser.add_argument("--model", type=Path, help="a trained model's folder, for `learning`")
    parser.add_argument("--contender", choices=CASES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    steps, threads = arguments.steps, arguments.threads
    if arguments.contender:
        run_trl(arguments.contender, arguments.model, steps, threads)
        return
    from areal.models.tiny import make_tiny_model

    ratios: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for case in arguments.cases:
            model = arguments.model
            if case != "learning":
                model = make_tiny_model(folder / case, seed=0)
                for name in ("config.json", "generation_config.json") if case == "tailed" else ():
                    file = model / name
                    content = json.loads(file.read_text()) | {"eos_token_id": STOPS}
                    file.write_text(json.dumps(content))
            elif model is None:
                parser.error("--cases learning needs --model FOLDER")
            found: dict[str, list[dict[str, Any]]] = {"ours": [], "trl": []}
            for number in range(arguments.rounds):
                runs = {"ours": ours(case, model, steps, folder, f"{case}{number}")}
                if arguments.trl:
                    runs["trl"] = theirs(arguments.trl, case, model, steps, threads)
                for name, rows in runs.items():
                    found[name].append(summary(case, name, rows))
                    print(json.dumps(found[name][-1]), flush=True)
            for key in ("wall", "cpu") if arguments.trl else ():
                their, our = (statistics.median(r[key] for r in found[n]) for n in ("trl", "ours"))
                ratios[f"{case}_{key}"] = round(their / our, 2)
    print(json.dumps(ratios))


if __name__ == "__main__":
    main()
