"""`areal check`, and what `areal run` does by itself before anything starts.

config.yaml ──> python -m areal_rollout.check (one row, a fake policy) ──> findings.jsonl
│ late: faulthandler ends it, stacks.txt says where
└ LIMIT_S: ended from here
"""

from __future__ import annotations

import asyncio
import re
import sys
import tempfile
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from areal.config.experiment import BaseExperimentConfig, save_config
from areal.errors import ArealError
from areal_launch.gpus.visible import hidden_unless
from areal_launch.processes.process import Child, ProcessSpec, last_lines
from areal_launch.view.output import CheckResult

LIMIT_S = 120.0
"""Deadline of the whole check in seconds; its parts have limits of their own."""
_FRAME = re.compile(r'^  File "([^"]+)", line (\d+)', re.MULTILINE)


class RecipeFailure(ArealError):
    """A recipe that fails on its first row."""


@dataclass(frozen=True)
class Finding:
    """One stage of one row."""

    stage: str
    """dataset, tokenizer, workflow, reward or packing."""
    of: str
    """The evaluation that the row is for; "": training."""
    verdict: CheckResult
    said: str
    traceback: str = ""

    def __str__(self) -> str:
        return f"{self.stage}{f' of {self.of!r}' if self.of else ''}: {self.said}"


async def check_recipe(config: BaseExperimentConfig, *, model_later: str) -> list[Finding]:
    """Sends the recipe's first row through workflow, reward and packing, in another process.

    Args:
        config: Resolved, with its recipe.
        model_later: What brings the model when a run begins; "": it is there.
    """
    # The variables that torchrun sets for a single trainer; and a check is not a run to record.
    environment = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "WANDB_MODE": "disabled"}
    environment |= hidden_unless(config.stack.gpus_per_node)
    with tempfile.TemporaryDirectory(prefix="areal-check-") as name:
        folder = Path(name)
        save_config(config, folder / "config.yaml")
        spec = ProcessSpec(
            name="check",
            argv=(
                *(sys.executable, "-m", "areal_rollout.check", str(folder)),
                *([model_later] if model_later else []),
            ),
            log=folder / "output.txt",
            environment=environment,
        )
        child = await Child.start(spec, f"check:{uuid.uuid4().hex}")
        try:
            async with asyncio.timeout(LIMIT_S):
                await child.wait()
        except TimeoutError:
            pass
        finally:
            code = await child.stop(0.0)  # with all that the user's code started
        return _findings(folder, config.recipe, code)


def _findings(folder: Path, recipe: str, code: int) -> list[Finding]:
    """Returns the findings that the process wrote, and what its exit code says."""
    file = folder / "findings.jsonl"
    lines: list[dict[str, Any]] = (
        [orjson.loads(line) for line in file.read_bytes().splitlines()] if file.exists() else []
    )
    findings = [_finding(line) for line in lines if "stage" in line and "late" not in line]
    if lines and "end" in lines[-1]:
        return findings
    stacks = folder / "stacks.txt"
    late = next((line for line in reversed(lines) if "late" in line), None)
    if late is not None and stacks.exists() and (text := stacks.read_text("utf-8")):
        places = [
            f"{path}:{line}"
            for path, line in _FRAME.findall(text)
            if Path(path).is_relative_to(recipe)
        ]
        where = f" ({places[0]})" if places else ""
        return [*findings, _finding({**late, "said": late["said"] + where, "traceback": text})]
    said = " | ".join(last_lines(folder / "output.txt")) or "no output"
    stage = late["stage"] if late is not None else "recipe"
    ended = f"its process ended with code {code}: {said}"
    return [*findings, Finding(stage, "", CheckResult.FAILED, ended)]


def _finding(line: dict[str, Any]) -> Finding:
    said = {key: line[key] for key in ("stage", "of", "said", "traceback") if key in line}
    return Finding(verdict=CheckResult(line["verdict"]), **said)


async def refuse_failing(config: BaseExperimentConfig, *, model_later: str) -> None:
    """Raises RecipeFailure, in one line, when the recipe's first row would fail."""
    if config.offline:  # no row passes a workflow or a reward
        return
    for finding in await check_recipe(config, model_later=model_later):
        if finding.verdict is CheckResult.FAILED:
            raise RecipeFailure(f"{finding}; nothing was started (details: areal check)")
