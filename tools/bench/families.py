"""A train step of every family that was correct at another revision, compared with that revision.

    git worktree add --detach FOLDER REVISION
    python tools/bench/families.py --base FOLDER [--rounds 12] [--json] [FAMILY ...]

Each contender is a process on one CPU thread that trains the same small random models with
`FSDPEngine` of its own checkout: four layers, hidden size 256, float32, so that the model takes
most of the time. A batch has 2 prompts of 32 tokens with 4 answers of 16 to 48 tokens each. The
contenders take turns of one batch. The measure is CPU time: of forward and backward
(`accumulate`), and of the whole step (with AdamW). Counts of forward and backward do not depend on
the machine's load: calls of Python functions, operations of torch, and the elements of all tensors
that these read.

A ratio is ours over the base's, below 1 where ours is faster: of CPU time the median over the
rounds, with the quartiles. `--base .` shows the noise. Without families, the bench compares those
that docs/models.md calls correct in both checkouts.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
GROUPS, SAMPLES, PROMPT = 2, 4, 32
ANSWER = (16, 48)
WIDER = 8
"""Times the widths of the models that docs/models.md is made with: hidden size 256."""
WARM_UP = 2
COUNT, COUNTS = "count", ("calls", "operations", "elements")


def correct(tree: Path) -> list[str]:
    """Returns the families that a checkout's docs/models.md calls correct."""
    page = (tree / "docs" / "models.md").read_text()
    table = page.partition("\n## Correct")[2].partition("\n## ")[0]
    return [line.split("`")[1] for line in table.splitlines() if line.startswith("| `")]


# -- a contender ------------------------------------------------------------------------------


def work(tree: Path) -> None:
    """Measures with the code of a checkout.

    Reads folders of models, one a line, and trains with the newest; an empty line asks for a step,
    COUNT for its counts.
    """
    import torch

    import areal
    from areal.config.training import MicroBatchSpec, OptimizerConfig, PPOActorConfig

    home = "areal_torch" if (tree / "services" / "areal_torch").is_dir() else "areal"  # before 0.3
    packing = import_module(f"{home}.algorithms.packing")
    kind = import_module(f"{home}.engines.fsdp").FSDPEngine
    assert Path(areal.__file__).is_relative_to(tree), f"imported {areal.__file__}"
    torch.set_num_threads(1)
    batch = packing.pack(*sequences())
    engine: Any = None
    answer: dict[str, float]
    for line in sys.stdin:
        folder = line.strip()
        if folder == COUNT:
            answer = counts(partial(engine.accumulate, batch, _loss))
            engine.apply()
        elif folder:
            if engine is not None:
                engine.destroy()
            spec = MicroBatchSpec(max_tokens_per_mb=4096)
            adamw = OptimizerConfig(lr=1e-5)
            engine = kind(PPOActorConfig(path=folder, optimizer=adamw, mb_spec=spec))
            engine.initialize()
            answer = {}
        else:
            marks = [time.process_time()]
            engine.accumulate(batch, _loss)
            marks.append(time.process_time())
            stats = engine.apply()
            marks.append(time.process_time())
            answer = {"model": marks[1] - marks[0], "step": marks[2] - marks[0]}
            answer["loss"] = stats["loss"]
        print("DONE " + json.dumps(answer), flush=True)


def counts(compute: Callable[[], None]) -> dict[str, float]:
    """Counts what `compute` does, which it does twice."""
    from torch.profiler import ProfilerActivity, profile

    calls = 0

    def note(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(note)
    compute()
    sys.setprofile(None)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        compute()
    operations = [event for event in seen.events() if event.name.startswith("aten::")]
    shapes = [shape for event in operations for shape in event.input_shapes if shape]
    elements = sum(math.prod(shape) for shape in shapes if isinstance(shape[0], int))
    return {"calls": calls, "operations": len(operations), "elements": elements}


def sequences() -> tuple[list[dict[str, Any]], list[int]]:
    """Returns what `packing.pack` takes; the same for both contenders."""
    draw, found, owner = random.Random(0), [], []
    for group in range(GROUPS):
        prompt = [draw.randrange(3, 700) for _ in range(PROMPT)]
        for _ in range(SAMPLES):
            answer = [draw.randrange(3, 700) for _ in range(draw.randint(*ANSWER))]
            mask = [False] * PROMPT + [True] * len(answer)
            found.append({"input_ids": prompt + answer, "loss_mask": mask})
            owner.append(group)
    return found, owner


def _loss(logprobs: Any, _: Any, batch: Any) -> Any:
    return -(logprobs * batch["loss_mask"]).sum(), {}


# -- both contenders ---------------------------------------------------------------------------


class Contender:
    """A process with the code of one checkout."""

    def __init__(self, tree: Path, log: Path) -> None:
        """Starts it; it writes what it says to `log`."""
        self._log = log
        with log.open("w") as output:
            self._process = subprocess.Popen(
                [sys.executable, __file__, "--work", str(tree)],
                env={**os.environ, "PYTHONPATH": str(tree / "services"), "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output, text=True,
            )  # fmt: skip

    def ask(self, line: str = "") -> dict[str, float]:
        """Sends one line to `work`; raises RuntimeError if the process has ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        for said in self._process.stdout:
            if said.startswith("DONE "):
                answer: dict[str, float] = json.loads(said[5:])
                return answer
        last = self._log.read_text().strip().splitlines()[-1:]
        raise RuntimeError(
            f"{self._log.stem} ended with {self._process.wait(60)}: {' '.join(last)}"
        )

    def end(self) -> None:
        """Ends the process and waits for it."""
        try:
            self._process.communicate(timeout=60)
        except BrokenPipeError:
            self._process.wait(60)


def compare(contenders: dict[str, Contender], model: Path, rounds: int) -> dict[str, Any]:
    """Alternates the contenders on one model; returns milliseconds of CPU and ratios.

    Raises:
        RuntimeError: One of them ended, or their losses are not the same.
    """
    for contender in contenders.values():
        contender.ask(str(model))
    rows: list[dict[str, dict[str, float]]] = []
    for number in range(rounds + WARM_UP):
        order = list(contenders.items())[:: 1 if number % 2 else -1]
        rows.append({name: contender.ask() for name, contender in order})
    first = [row["loss"] for row in rows[0].values()]
    if abs(first[0] - first[1]) > 1e-3:
        raise RuntimeError(f"the losses of the first step are {first[0]:.5f} and {first[1]:.5f}")
    rows, found = rows[WARM_UP:], dict[str, Any]()
    counted = {name: contender.ask(COUNT) for name, contender in contenders.items()}
    for what in COUNTS:
        found[what] = round(counted["ours"][what] / counted["base"][what], 3)
    for what in ("model", "step"):
        ratios = [row["ours"][what] / row["base"][what] for row in rows]
        low, middle, high = statistics.quantiles(ratios, n=4)
        least = {name: min(row[name][what] for row in rows) for name in contenders}
        found[what] = {
            **{name: round(1000 * value, 2) for name, value in least.items()},
            "ratio": round(middle, 3),
            "quartiles": [round(low, 3), round(high, 3)],
            "of_least": round(least["ours"] / least["base"], 3),
        }
    return found


def main() -> int:
    """Prints a line for each family; 1 if one of them could not be compared."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="*", help="model types")
    parser.add_argument("--base", type=Path, help="folder of a checkout of another revision")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--json", action="store_true", help="end with one JSON line")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        work(arguments.work)
        return 0
    if arguments.base is None:
        parser.error("--base: expected a folder")
    sys.path.insert(0, str(REPOSITORY))
    from tools.tiny_architectures import tiny_model
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    trees = {"base": arguments.base.resolve(), "ours": REPOSITORY}
    now = correct(trees["ours"])
    families = arguments.families or [each for each in correct(trees["base"]) if each in now]
    found: dict[str, Any] = {}
    head = f"{'':20s} base ms  ours ms  ratio  quartiles       of least  whole step"
    print(head + "  calls  operations  elements", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        contenders: dict[str, Contender] = {}
        for family in families:
            model = Path(folder) / family
            tiny_model(family, 0, WIDER).save_pretrained(model)
            if not contenders:
                logs = {name: Path(folder) / f"{name}.log" for name in trees}
                contenders = {name: Contender(tree, logs[name]) for name, tree in trees.items()}
            try:
                one = found[family] = compare(contenders, model, arguments.rounds)
            except RuntimeError as error:
                found[family] = {"error": str(error)}
                print(f"{family:20s} {error}", flush=True)
                for contender in contenders.values():
                    contender.end()
                contenders = {}
                continue
            shutil.rmtree(model)
            at = one["model"]
            low, high = at["quartiles"]
            print(
                f"{family:20s} {at['base']:7.1f}  {at['ours']:7.1f}  {at['ratio']:.3f}  "
                f"{low:.3f} to {high:.3f}  {at['of_least']:.3f}     {one['step']['ratio']:.3f}"
                f"       {one['calls']:.3f}  {one['operations']:.3f}       {one['elements']:.3f}",
                flush=True,
            )
        for contender in contenders.values():
            contender.end()
    if arguments.json:
        print(json.dumps(found))
    return int(any("error" in one for one in found.values()))


if __name__ == "__main__":
    sys.exit(main())
