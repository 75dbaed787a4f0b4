"""GRPO end to end and TRL: generation, rewards and updates of the same task on the same cores.

    python tools/bench/end_to_end.py --trl VENV/bin/python [--rounds 3] [--steps 12]

Both train a 0.6 M parameter Qwen2 on two-digit addition with the same rows, 64 problems x 8 answers
per step, learning rate and clip range, and each with its library's GRPO. Ours is `areal run` with
two servers. TRL is one process with `--threads` threads (1.16; its environment is that of
tools/bench/trainer.py). They alternate.

`uniform`: random weights, exactly 16 tokens. `tailed`: 4 of 261 tokens end an answer, so its length
is geometric with a mean of 65, and at most 512. `learning`: the demo's warm-started model in
`--model` and the task's own lengths. Every SAVE_EVERY-th step is saved, and each of these models
then answers each held-out problem four times at temperature 1.

Steps are timed from the WARM_UP-th on. A JSON line for each run has wall and CPU milliseconds per
sample (for ours, CPU also by process), tokens per sample, (seconds, reward) of each step, and
(seconds, accuracy) of each saved step. The last line has the ratios of the medians, TRL's over
ours. `learning_time` is the time that TRL takes to its final accuracy (mean of its last three) over
the time that ours takes to reach this accuracy.
`--figure FILE` draws the held-out accuracies over the seconds since the first step.
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
SAVE_EVERY = 10


def tiny_model(folder: Path, *, tailed: bool) -> Path:
    """A random model; `tailed`: 4 of its 261 tokens end an answer, so lengths are geometric."""
    from areal_torch.models.tiny import make_tiny_model

    model = make_tiny_model(folder, seed=0)
    for name in ("config.json", "generation_config.json") if tailed else ():
        file = model / name
        file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": STOPS}))
    return model


def run_trl(case: str, model: Path, steps: int, threads: int, saved: Path | None) -> None:
    """TRL's GRPOTrainer on the rows; a line of JSON after each step."""
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from areal.datasets.arithmetic import addition

    torch.set_num_threads(threads)
    rows, _ = addition(2, train=6000, heldout=500, seed=0)
    step: dict[str, float] = {}

    def reward(
        completions: list[Any], answer: list[str], completion_ids: list[Any], **_: Any
    ) -> list[float]:
        texts = [each[0]["content"] for each in completions]
        rewards = [
            float(text.strip().lstrip("0") == a) for text, a in zip(texts, answer, strict=True)
        ]
        step["reward"] = sum(rewards) / len(rewards)
        step["tokens"] = sum(map(len, completion_ids)) / len(rewards)
        return rewards

    class Report(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, _: Any, state: Any, __: Any, *, model: Any, **___: Any) -> None:
            if saved and state.global_step % SAVE_EVERY == 0:
                model.save_pretrained(saved / str(state.global_step))
            times = os.times()
            line = {"time": time.time(), "cpu": times.user + times.system, **step}
            print("STEP " + json.dumps(line), flush=True)

    length = CASES[case]
    GRPOTrainer(
        model=str(model),
        reward_funcs=reward,
        args=GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            per_device_train_batch_size=GROUPS * SAMPLES,
            num_generations=SAMPLES,
            max_completion_length=length,
            generation_kwargs={"min_new_tokens": length} if case == "uniform" else None,
            learning_rate=LEARNING_RATE,
            warmup_steps=0.05,
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


def theirs(
    python: str, case: str, model: Path, steps: int, threads: int, folder: Path
) -> list[dict[str, float]]:
    """The steps of a run of TRL."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    environment["PYTHONPATH"] = str(REPOSITORY / "services")
    command = [python, __file__, "--contender", case, "--model", str(model)]
    command += ["--steps", str(steps), "--threads", str(threads)]
    command += ["--saved", str(folder)] if case == "learning" else []
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=True)
    return [json.loads(line[5:]) for line in ran.stdout.splitlines() if line.startswith("STEP ")]


def ours(
    case: str, model: Path, steps: int, folder: Path, trial: str, saved: Path
) -> list[dict[str, Any]]:
    """The steps of an `areal run`; CPU is that of all its processes, and of each."""
    from sample_path import cpu_seconds

    length = CASES[case]
    recipe = Path(__file__).parent / "peers" / "arithmetic_grpo.py"
    command = [sys.executable, "-m", "areal_launch.cli", "run", str(recipe), "--json"]
    command += [f"trial_name={trial}", f"total_train_steps={steps}", f"model.path={model}"]
    command += [f"gconfig.max_new_tokens={length}", f"model.context_length={length + 32}"]
    command += [f"whole_length={str(case == 'uniform').lower()}"]
    command += [f"actor.optimizer.lr={LEARNING_RATE}", "actor.optimizer.min_lr_ratio=0"]
    command += [f"save_every={SAVE_EVERY}", f"saved={saved}"] if case == "learning" else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = str(REPOSITORY / "services")
    process = subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL)
    run_dir = folder / "runs" / "end-to-end" / trial
    metrics, cpu = run_dir / "metrics.jsonl", dict[int, dict[str, float]]()
    try:
        while process.poll() is None:
            done = len(metrics.read_bytes().splitlines()) if metrics.exists() else 0
            if done < steps and done not in cpu and done:
                cpu[done] = cpu_seconds(run_dir)
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
            "cpu": sum(cpu.get(row["step"], {}).values()),
            "processes": cpu.get(row["step"], {}),
            "reward": row["reward/mean"],
            "tokens": row["rollout/length_mean"],
        }
        for row in found
    ]


def summary(case: str, name: str, steps: list[dict[str, Any]]) -> dict[str, Any]:
    """One run: from the WARM_UP-th step to the last one whose CPU is known."""
    timed = [step for step in steps[WARM_UP - 1 :] if step["cpu"]]
    first, last = timed[0], timed[-1]
    samples = GROUPS * SAMPLES * (steps.index(last) - steps.index(first))
    spent = {
        process: round(1000 * (seconds - first["processes"].get(process, 0.0)) / samples, 3)
        for process, seconds in last.get("processes", {}).items()
    }
    curve = [(round(s["time"] - steps[0]["time"], 2), round(s["reward"], 3)) for s in steps]
    return {
        "case": case,
        "contender": name,
        "wall": round(1000 * (last["time"] - first["time"]) / samples, 3),
        "cpu": round(1000 * (last["cpu"] - first["cpu"]) / samples, 3),
        "processes": spent,
        "tokens": round(statistics.mean(s["tokens"] for s in steps), 1),
        "curve": curve,
    }


def accuracy(folder: Path, tokenizer: Path) -> float:
    """The share of right answers of a saved model: four to each held-out problem, sampled."""
    import torch
    from transformers import AutoModelForCausalLM

    from areal.datasets.arithmetic import addition
    from areal.tokenizer import Tokenizer

    torch.set_num_threads(1)
    torch.manual_seed(0)
    _, heldout = addition(2, train=6000, heldout=500, seed=0)
    codec, right = Tokenizer.load(tokenizer), 0
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompts = [codec.apply_chat_template(row["messages"]) for row in heldout]
    for length in set(map(len, prompts)):
        rows = [
            (p, row["answer"]) for p, row in zip(prompts, heldout, strict=True) if len(p) == length
        ]
        ids = torch.tensor([prompt for prompt, _ in rows])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=CASES["learning"],
            do_sample=True,
            temperature=1.0,
            top_k=0,
            num_return_sequences=4,
            eos_token_id=codec.eos_token_id,
            pad_token_id=codec.eos_token_id,
        )
        texts = codec.decode_batch(out[:, length:].tolist(), skip_special_tokens=True)
        right += sum(
            text.strip().lstrip("0") == rows[index // 4][1] for index, text in enumerate(texts)
        )
    return right / (4 * len(heldout))


def lead(our: dict[str, Any], their: dict[str, Any]) -> float:
    """TRL's time to its final held-out accuracy over ours to the same; 0 if ours never has it."""
    goal = statistics.mean(accuracy for _, accuracy in their["heldout"][-3:])
    times = [
        next((seconds for seconds, accuracy in run["heldout"] if accuracy >= goal), None)
        for run in (our, their)
    ]
    return times[1] / times[0] if times[0] and times[1] else 0.0


def draw(found: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Held-out accuracy over time: a line for each run."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "end_to_end"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.5))
    for (name, runs), color in zip(found.items(), ("tab:blue", "tab:orange"), strict=True):
        for number, run in enumerate(runs):
            label = {"ours": "AReaL", "trl": "TRL"}[name] if number == 0 else None
            axes.plot(*zip(*run["heldout"], strict=True), color=color, linewidth=1.2, label=label)
    axes.set_xlabel("seconds since the first step")
    axes.set_ylabel("held-out accuracy")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def main() -> None:
    """Runs the cases and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trl", help="python of an environment with TRL")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--threads", type=int, default=2, help="of TRL's process")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=["uniform", "tailed"])
    parser.add_argument("--model", type=Path, help="a trained model's folder, for `learning`")
    parser.add_argument("--figure", type=Path, help="an SVG file to draw, for `learning`")
    parser.add_argument("--contender", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--saved", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    steps, threads = arguments.steps, arguments.threads
    if arguments.contender:
        run_trl(arguments.contender, arguments.model, steps, threads, arguments.saved)
        return
    ratios: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for case in arguments.cases:
            model = arguments.model
            if case != "learning":
                model = tiny_model(folder / case, tailed=case == "tailed")
            elif model is None:
                parser.error("--cases learning needs --model FOLDER")
            found: dict[str, list[dict[str, Any]]] = {"ours": [], "trl": []}
            for number in range(arguments.rounds):
                for name in ("ours", "trl") if arguments.trl else ("ours",):
                    trial = f"{case}{number}"
                    saved = folder / name / trial
                    if name == "ours":
                        rows = ours(case, model, steps, folder, trial, saved)
                    else:
                        rows = theirs(arguments.trl, case, model, steps, threads, saved)
                    line = summary(case, name, rows)
                    if case == "learning":
                        line["heldout"] = [
                            (line["curve"][step - 1][0], accuracy(saved / str(step), model))
                            for step in range(SAVE_EVERY, steps + 1, SAVE_EVERY)
                        ]
                    found[name].append(line)
                    print(json.dumps(line), flush=True)
            for key in ("wall", "cpu") if arguments.trl else ():
                their, our = (statistics.median(r[key] for r in found[n]) for n in ("trl", "ours"))
                ratios[f"{case}_{key}"] = round(their / our, 2)
            if case == "learning" and arguments.trl:
                ratios["learning_time"] = round(
                    statistics.median(map(lead, found["ours"], found["trl"])), 2
                )
            if case == "learning" and arguments.figure:
                draw(found, arguments.figure)
    print(json.dumps(ratios))


if __name__ == "__main__":
    main()
