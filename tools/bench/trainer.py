"""A GRPO train step, compared with TRL's and with plain padded transformers; one CPU thread each.

    python tools/bench/trainer.py [--trl VENV/bin/python] [--rounds 7] [--profile]

Every contender trains the tiny Qwen2 (0.6 M parameters, 261 tokens) on the same 8 prompts x 8
samples in a process of its own, and they alternate. Each step starts with given completions
(nothing is generated) and ends after AdamW. `uniform`: 16 tokens each. `tailed`: up to 512 tokens,
log-normal around 64. Prompts have 16 tokens. TRL (1.16) runs in the interpreter of `--trl`, which
these commands create:

    python -m venv --system-site-packages VENV; VENV/bin/pip install trl==1.16.0

One JSON line for each case. The last one has the ratios: seconds and CPU seconds of a contender
over ours, and our memory (peak minus memory before the first step, per token) over theirs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
GROUPS, SAMPLES, PROMPT = 8, 8, 16
CASES = ("uniform", "tailed")
LEARNING_RATE = 1e-4


def completions(case: str, step: int) -> list[list[int]]:
    """Token ids of all samples; the same for each contender."""
    draw = random.Random(step)
    lengths = [16] * (GROUPS * SAMPLES)
    if case == "tailed":
        lengths = [min(512, max(4, round(draw.lognormvariate(4.16, 1.0)))) for _ in lengths]
        lengths[0] = 512
    return [[draw.randrange(97, 122) for _ in range(length)] for length in lengths]


def prompts() -> list[list[int]]:
    """Token ids of each group's prompt."""
    return [[97 + group] * PROMPT for group in range(GROUPS)]


def resident() -> int:
    """Bytes of this process in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


class Meter:
    """Waits for the word, takes the time of a step, and reports it on standard output."""

    def __init__(self) -> None:
        """Measures the memory before the first step."""
        self.base = resident()
        self.marks = (0.0, 0.0)

    def wait(self) -> bool:
        """Whether another step is asked for."""
        line = sys.stdin.readline()
        self.marks = time.perf_counter(), time.process_time()
        return bool(line)

    def done(self) -> None:
        """Reports the time and memory of a step."""
        wall, cpu = time.perf_counter() - self.marks[0], time.process_time() - self.marks[1]
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - self.base
        print("STEP " + json.dumps({"seconds": wall, "cpu": cpu, "bytes": peak}), flush=True)


def run_ours(case: str, model: Path) -> None:
    """Takes steps with the packed engine."""
    import numpy as np

    from areal.config.training import MicroBatchSpec, OptimizerConfig, PPOActorConfig
    from areal_torch.algorithms import packing
    from areal_torch.engines.fsdp import FSDPEngine
    from areal_torch.engines.ppo import PPOActor

    config = PPOActorConfig(
        path=str(model),
        optimizer=OptimizerConfig(lr=LEARNING_RATE),
        reward_norm="group/group",
        mb_spec=MicroBatchSpec(max_tokens_per_mb=4096),
    )
    engine = FSDPEngine(config)
    engine.initialize()
    actor = PPOActor(config, engine)
    meter, step = Meter(), 0
    while meter.wait():
        sequences, owner = [], []
        for number, completion in enumerate(completions(case, step)):
            ids = np.array(prompts()[number // SAMPLES] + completion)
            mask = np.arange(len(ids)) >= PROMPT
            rewards = np.zeros(len(ids), dtype=np.float32)
            rewards[-1] = number % 2
            sequences.append(
                {
                    "input_ids": ids,
                    "loss_mask": mask,
                    "behavior_logprobs": mask * np.float32(-5.0),
                    "token_versions": np.where(mask, 0, -1),
                    "rewards": rewards,
                }
            )
            owner.append(number // SAMPLES)
        batch = packing.pack(sequences, owner)
        actor.compute_advantages(batch)
        actor.ppo_update(batch)
        meter.done()
        step += 1


def run_plain(case: str, model: Path) -> None:
    """A padded batch through transformers, its logits as they come; clipped loss, AdamW."""
    import torch
    from transformers import AutoModelForCausalLM

    hf = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(hf.parameters(), lr=LEARNING_RATE)
    meter, step = Meter(), 0
    while meter.wait():
        rows = completions(case, step)
        longest = PROMPT + max(map(len, rows))
        ids = torch.zeros(len(rows), longest, dtype=torch.int64)
        attention = torch.zeros_like(ids)
        for number, completion in enumerate(rows):
            row = prompts()[number // SAMPLES] + completion
            ids[number, : len(row)] = torch.tensor(row)
            attention[number, : len(row)] = 1
        rewards = (torch.arange(len(rows)) % 2).float().view(GROUPS, SAMPLES)
        advantages = (rewards - rewards.mean(1, keepdim=True)) / rewards.std(1, keepdim=True)
        logits = hf(input_ids=ids, attention_mask=attention, use_cache=False).logits
        logprobs = logits[:, PROMPT - 1 : -1].log_softmax(-1)
        logprobs = logprobs.gather(2, ids[:, PROMPT:, None])[..., 0]
        mask = attention[:, PROMPT:]
        ratio = (logprobs - logprobs.detach()).exp()
        above = advantages.view(-1, 1)
        loss = torch.minimum(ratio * above, ratio.clamp(0.8, 1.2) * above)
        torch.autograd.backward(-(loss * mask).sum() / mask.sum())
        torch.nn.utils.clip_grad_norm_(hf.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        meter.done()
        step += 1


def run_trl(case: str, model: Path) -> None:
    """TRL's GRPOTrainer, its completions given by a rollout function."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    step = 0
    meter: Meter | None = None

    def rollout(texts: list[Any], _trainer: Any) -> dict[str, Any]:
        nonlocal step, meter
        rows = completions(case, step)
        step += 1
        meter = meter or Meter()
        if not meter.wait():
            os._exit(0)  # the trainer has no other way out of the middle of a step
        return {
            "prompt_ids": [prompts()[number // SAMPLES] for number in range(len(texts))],
            "completion_ids": rows,
            "logprobs": [[-5.0] * len(row) for row in rows],
        }

    class Report(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            assert meter is not None
            meter.done()

    def reward(completions: list[Any], **_: Any) -> list[float]:
        return [float(number % 2) for number in range(len(completions))]

    GRPOTrainer(
        model=str(model),
        reward_funcs=reward,
        args=GRPOConfig(
            output_dir=str(model / "trl"),
            per_device_train_batch_size=GROUPS * SAMPLES,
            num_generations=SAMPLES,
            max_completion_length=512,
            learning_rate=LEARNING_RATE,
            beta=0.0,
            max_steps=1_000_000,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            model_init_kwargs={"dtype": "float32"},
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list([{"prompt": "1+1="}] * GROUPS),
        rollout_func=rollout,
        callbacks=[Report()],
    ).train()


CONTENDERS = {"ours": run_ours, "plain": run_plain, "trl": run_trl}


class Contender:
    """A process that takes a step when asked."""

    def __init__(self, python: str, name: str, case: str, model: Path) -> None:
        """Starts the process of a contender."""
        self.name = name
        path = f"{REPOSITORY / 'services'}:{os.environ.get('PYTHONPATH', '')}"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        environment |= {"TRL_EXPERIMENTAL_SILENCE": "1", "TOKENIZERS_PARALLELISM": "false"}
        self._process = subprocess.Popen(
            [python, __file__, "--contender", name, "--case", case, "--model", str(model)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip

    def step(self) -> dict[str, float]:
        """Takes one; raises RuntimeError if the process has ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("STEP "):
                measured: dict[str, float] = json.loads(line[5:])
                return measured
        raise RuntimeError(f"{self.name} ended with code {self._process.wait(60)}")

    def end(self) -> None:
        """Ends the process and waits for it."""
        self._process.communicate(timeout=60)


def compare(case: str, pythons: dict[str, str], model: Path, rounds: int) -> dict[str, float]:
    """Alternates the contenders of a case; returns the ratios."""
    contenders = [Contender(python, name, case, model) for name, python in pythons.items()]
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in pythons}
    for number in range(rounds + 1):
        for contender in contenders:
            row = contender.step()
            if number:  # the first warms up
                measured[contender.name].append(row)
    for contender in contenders:
        contender.end()
    tokens = max(
        sum(map(len, completions(case, step))) + GROUPS * SAMPLES * PROMPT
        for step in range(rounds + 1)
    )
    found = {
        name: {
            "seconds": statistics.median(row["seconds"] for row in rows),
            "cpu": statistics.median(row["cpu"] for row in rows),
            "bytes_per_token": max(row["bytes"] for row in rows) / tokens,
        }
        for name, rows in measured.items()
    }
    for name, row in found.items():
        shown = {key: round(value, 4) for key, value in row.items()}
        print(json.dumps({"case": case, "contender": name, **shown}), flush=True)
    ours, ratios = found.pop("ours"), {}
    for name, row in found.items():
        ratios[f"{case}_{name}_seconds"] = round(row["seconds"] / ours["seconds"], 2)
        ratios[f"{case}_{name}_cpu"] = round(row["cpu"] / ours["cpu"], 2)
        memory = ours["bytes_per_token"] / row["bytes_per_token"]
        ratios[f"{case}_{name}_memory"] = round(memory, 2)
    return ratios


def profile(case: str, model: Path) -> None:
    """Prints where our step spends its time."""
    code = (
        "import sys, io, cProfile, pstats; sys.path.insert(0, 'tools/bench'); import trainer;"
        "from pathlib import Path; sys.stdin = io.StringIO('\\n' * 10); p = cProfile.Profile();"
        f"p.runcall(trainer.run_ours, {case!r}, Path({str(model)!r}));"
        "pstats.Stats(p).sort_stats('tottime').print_stats(25)"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "services"), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, env=environment, check=True)


def main() -> None:
    """Runs the contenders and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trl", help="python of an environment with TRL; left out without it")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cases", nargs="+", default=CASES, choices=CASES)
    parser.add_argument("--profile", action="store_true", help="where our step spends its time")
    parser.add_argument("--contender", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.contender:
        CONTENDERS[arguments.contender](arguments.case, arguments.model)
        return
    from areal_torch.models.tiny import make_tiny_model

    pythons = {"ours": sys.executable, "plain": sys.executable}
    if arguments.trl:
        pythons["trl"] = arguments.trl
    ratios: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "tiny"
        make_tiny_model(model, seed=0)
        for case in arguments.cases:
            if arguments.profile:
                profile(case, model)
            ratios |= compare(case, pythons, model, arguments.rounds)
    print(json.dumps(ratios))


if __name__ == "__main__":
    main()
