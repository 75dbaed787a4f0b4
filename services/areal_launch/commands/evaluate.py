"""`areal eval RECIPE`: runs a recipe's own evaluations on a checkpoint, or on two; trains nothing.

checkpoint ── export ──> model ──> a stack of its own, TRIAL-eval-WHICH ──> evaluations
│                                  main ends when it asks for a batch           │
another one, for --against: the same                     differences by row  <──┘
"""

from __future__ import annotations

import contextlib
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from areal.config.experiment import BaseExperimentConfig
from areal.errors import InvalidInput, NotFound
from areal_launch.commands.row_differences import print_differences
from areal_launch.commands.run import run_here
from areal_launch.commands.stack import read_experiment, with_model
from areal_launch.commands.versions import export_version, find_checkpoint
from areal_launch.run_folder import RunFolder

START = "start"
_NAMED = re.compile(f"best|latest|{START}|[0-9]{{1,18}}")
_OPTIONS = ("--checkpoint", "--against")
_LONGEST_TRIAL = 63


@dataclass(frozen=True)
class Evaluation:
    """What is evaluated, and the trial that does it."""

    which: str
    trial: str
    folder: RunFolder

    @property
    def model(self) -> Path:
        """Folder to which the checkpoint is exported until the evaluation has ended."""
        return self.folder.path / "model"

    def clean(self) -> None:
        """Removes the exported model, and the folder if nothing else is there."""
        shutil.rmtree(self.model, ignore_errors=True)
        for empty in (self.folder.logs, self.folder.path):
            with contextlib.suppress(OSError):  # it has results, or was never made
                empty.rmdir()


def evaluate_recipe(
    recipe: Path,
    config: Path | None,
    overrides: list[str],
    *,
    checkpoint: str,
    against: str,
    as_json: bool,
) -> int:
    """Evaluates one or two policies of a recipe's trial; returns the exit code.

    Args:
        recipe: Its `main` evaluates before it asks for its first batch.
        config: The experiment file; None: the one beside the recipe.
        overrides: Of the experiment file.
        checkpoint: Best, latest, a step, or start (`model.path`); "": latest, or start if
            `model.path` is among the overrides.
        against: The same, for the policy to compare with; "": none.
        as_json: Whether to print JSON Lines.

    Raises:
        InvalidInput: The recipe has no servers, a policy is named otherwise, or both are the same.
        NotFound: There is no such checkpoint.
    """
    experiment, _ = read_experiment(recipe, config, overrides)
    if experiment.offline:
        raise InvalidInput(
            f"areal eval {recipe}: allocation_mode {experiment.allocation_mode!r} has no servers: "
            "expected e.g. 'sglang:d1+fsdp:d1', for a recipe that calls rollout.evaluate"
        )
    own_model = any(value.startswith("model.path=") for value in overrides)
    sides = [checkpoint or (START if own_model else "latest"), *([against] if against else [])]
    for index, (option, which) in enumerate(zip(_OPTIONS, sides, strict=False)):
        if not _NAMED.fullmatch(which):
            raise InvalidInput(
                f"{option} {which!r:.80}: expected best, latest, {START}, or the step of a "
                "checkpoint"
            )
        sides[index] = str(int(which)) if which.isdigit() else which
    if own_model and START not in sides:
        raise InvalidInput(
            f"model.path: expected --checkpoint {START} with it, because --checkpoint {sides[0]} "
            "names another model"
        )
    policies = [_policy(experiment, *side) for side in zip(_OPTIONS, sides, strict=False)]
    if len(set(policies)) < len(sides):
        raise InvalidInput(
            f"--against {against!r}: expected another one than --checkpoint {sides[0]}; both are "
            f"{policies[0]}"
        )
    chosen = [_evaluation(experiment, which) for which in sides]
    try:
        for each in chosen:
            if each.which != START and (code := _export(experiment, each, as_json=as_json)):
                return code
        for each in chosen:
            if code := _run(recipe, config, overrides, experiment, each, as_json=as_json):
                return code
    finally:
        for each in chosen:
            each.clean()
    if against:
        first, second = chosen
        print_differences(
            (first.which, first.folder.path), (second.which, second.folder.path), as_json=as_json
        )
    return 0


def _evaluation(experiment: BaseExperimentConfig, which: str) -> Evaluation:
    """Returns the evaluation, in a trial of its own so that no earlier results are mixed in."""
    number = 1
    while True:
        suffix = f"-eval-{which}" + (f"-{number}" if number > 1 else "")
        trial = experiment.trial_name[: _LONGEST_TRIAL - len(suffix)].rstrip("-") + suffix
        folder = experiment.run_dir.with_name(trial)
        if not folder.exists():
            return Evaluation(which, trial, RunFolder(folder))
        number += 1


def _policy(experiment: BaseExperimentConfig, option: str, which: str) -> str:
    """Returns what a name stands for now: two names may stand for one checkpoint."""
    if which == START:
        return START
    trained = RunFolder(experiment.run_dir)
    if not trained.stack_file.is_file():
        raise NotFound(
            f"{option} {which}: {str(trained.path)!r} has not been trained: expected "
            f"`areal run` first, or {option} {START} for the model that the recipe starts from"
        )
    return find_checkpoint(trained.path, which).path.name


def _export(experiment: BaseExperimentConfig, wanted: Evaluation, *, as_json: bool) -> int:
    wanted.folder.make(shared=bool(experiment.endpoints.inference))
    # With --json, stdout has events only.
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        return export_version(experiment.run_dir, wanted.which, wanted.model)


def _run(
    recipe: Path,
    config: Path | None,
    overrides: list[str],
    experiment: BaseExperimentConfig,
    wanted: Evaluation,
    *,
    as_json: bool,
) -> int:
    own, module = read_experiment(recipe, config, [*overrides, f"trial_name={wanted.trial}"])
    start = wanted.which == START
    # The start's path may have the trial's name in it.
    own.model.path = experiment.model.path if start else str(wanted.model.resolve())
    made = start and callable(getattr(module, "prepare_model", None))
    return run_here(with_model(own, can_prepare=made), as_json=as_json, only_evaluate=True)
