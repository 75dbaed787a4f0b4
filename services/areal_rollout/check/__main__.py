"""`python -m areal_rollout.check FOLDER [WHAT_BRINGS_THE_MODEL]`: one row of a recipe.

The experiment is FOLDER/config.yaml; its `recipe` names the recipe.

Writes FOLDER/findings.jsonl (see `report.Report`) and, when it is ended for being late, its stacks
to FOLDER/stacks.txt. A process of its own, which its caller can end: it runs the user's code.
"""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

from areal.config.experiment import GRPOConfig, load_service_config
from areal.config.learning_rules import computes_advantages, single_samples
from areal.errors import InvalidInput
from areal.recipe import Recipe, load_recipe
from areal.tokenizer import Tokenizer
from areal.workflows.rlvr import RLVRWorkflow
from areal_rollout.check.report import Report
from areal_rollout.check.row import RowCheck
from areal_rollout.check.stand_ins import FirstBatch, StandIns
from areal_rollout.failures import describe_failure

MAIN_S = 30.0
"""Seconds that `main` may take to reach its first batch; if it takes longer, it is not judged."""
# A trainer has these, and its process group; a check need not.
_TRAINER_ONLY = ("torch", "transformers", "safetensors")


def check(config_file: Path, report: Report, *, model_later: str) -> None:
    """Reports on everything that can be reached.

    `model_later`: what brings the model when a run begins; "": it is there.
    """
    config: GRPOConfig = load_service_config(config_file)
    recipe = Recipe.read(Path(config.recipe))
    stand_ins = StandIns()
    missing = (config.model.path, f"{model_later} when a run begins") if model_later else None
    _run_main(recipe, config_file, stand_ins, report, missing)
    if not stand_ins.samples:
        return
    shown = stand_ins.samples[-1]
    report.found("dataset", "ok", f"first row: {_short(shown.row)}")
    for sample in stand_ins.samples:
        if not sample.of and (why := _single_samples(config, sample.workflow)):
            report.found("workflow", "failed", why)
            return
    where = str(config.tokenizer_dir)
    if missing:
        report.found("tokenizer", "unknown", f"{where}: {missing[1]}")
        return
    if not (config.tokenizer_dir / "tokenizer.json").is_file() and config.endpoints.rollout:
        report.found("tokenizer", "unknown", f"{where}: not here; only the rollout service has it")
        return
    try:
        tokenizer = Tokenizer.load(config.tokenizer_dir, Path(config.model.path))
    except InvalidInput as error:
        report.found("tokenizer", "failed", str(error))
        return
    template = "" if tokenizer.chat_template else ", no chat template"
    report.found("tokenizer", "ok", f"{where}: {tokenizer.vocab_size} ids{template}")
    rows = RowCheck(config, recipe, tokenizer, report)
    for sample in stand_ins.samples:
        rows.check(sample)


def _single_samples(config: GRPOConfig, workflow: object) -> str:
    """Returns why the groups cannot teach anything; other classes form their own groups."""
    if type(workflow) is not RLVRWorkflow or not computes_advantages(config):
        return ""
    return single_samples(config, workflow.gconfig.n_samples)


def _run_main(
    recipe: Recipe,
    config_file: Path,
    stand_ins: StandIns,
    report: Report,
    missing: tuple[str, str] | None,
) -> None:
    """Runs `main` up to its first batch; reports when it does not get there.

    `missing`: the path of a model that does not exist yet, and what brings it.
    """
    late = f"main had not asked for a batch after {MAIN_S:g} s: not checked"
    try:
        with report.within(MAIN_S, "dataset", "unknown", late), stand_ins.installed():
            module = load_recipe(recipe.source, recipe.file_name)
            module.main(["--config", str(config_file)])
    except FirstBatch:
        if not stand_ins.samples:
            report.found("dataset", "ok", "no rows: outside agents open sessions at the gateway")
        return
    except (Exception, SystemExit) as error:
        said = f"main: {describe_failure(error).detail}"
        if _of_trainer(error):
            report.found(
                "dataset",
                "unknown",
                f"{said}: only the trainer can run this",
            )
        elif missing and missing[0] in str(error):  # main reads the model's tokenizer, say
            report.found("dataset", "unknown", f"{said}; {missing[1]}")
        elif stand_ins.guesses:
            report.found(
                "dataset",
                "unknown",
                f"{said}; maybe only because {stand_ins.guesses[0]} is a stand-in",
            )
        elif isinstance(error, SystemExit) and not error.code:
            report.found("dataset", "unknown", "main ended before it asked for a batch")
        else:
            report.found("dataset", "failed", said)
        return
    report.found("dataset", "unknown", "main ended before it asked for a batch")


def _of_trainer(error: BaseException) -> bool:
    """Whether an error is of what only a trainer has."""
    if isinstance(error, ModuleNotFoundError):
        return error.name in _TRAINER_ONLY
    raised_in = traceback.extract_tb(error.__traceback__)[-1].filename
    return not set(_TRAINER_ONLY).isdisjoint(Path(raised_in).parts)


def _short(row: object) -> str:
    text = " ".join(repr(row).split())
    return text if len(text) <= 120 else f"{text[:117]}..."


def main(argv: list[str]) -> None:
    """Parses the command line: the folder and, where there is no model yet, what brings it."""
    folder, later = Path(argv[0]), argv[1:]
    with (folder / "stacks.txt").open("w", encoding="utf-8") as stacks:
        report = Report(folder / "findings.jsonl", stacks)
        check(folder / "config.yaml", report, model_later=" ".join(later))
        report.end()


if __name__ == "__main__":
    main(sys.argv[1:])
