"""`python -m areal_torch.engines.export_checkpoint CONFIG CHECKPOINT FOLDER START`: a Hub folder.

The folder then has what `save_pretrained` writes, the tokenizer with its chat template, and a model
card of the run; of a run with LoRA, merged weights, and its adapters in `adapter` as peft reads
them. A process of its own, since the command line imports no torch.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from areal.config.experiment import GRPOConfig, load_service_config
from areal.config.training import TrainEngineConfig
from areal.errors import ArealError, InvalidInput
from areal.model_directory import serving_dtype
from areal.runs.checkpoints import removed
from areal.runs.run_files import EVALUATIONS, over_rows
from areal_torch.engines.checkpoint import holds_scalar_model
from areal_torch.engines.fsdp import FSDPEngine
from areal_torch.engines.model import lora


def export(config_file: Path, checkpoint: Path, folder: Path, start: Path) -> None:
    """Writes a Hugging Face directory of a checkpoint's weights, in the precision of the source.

    A relative model.path is relative to `start`, the folder in which the run was started.

    Raises:
        InvalidInput: The model or the checkpoint cannot be read.
    """
    config = load_service_config(config_file)
    scalar = holds_scalar_model(checkpoint)
    source = str(start / config.model.path)
    if not Path(source, "config.json").is_file():
        raise InvalidInput(
            f"model.path {config.model.path!r}: expected the model that the run trained, with its "
            f"config.json, in {source}"
        )
    adapters = config.actor.lora
    engine = FSDPEngine(
        TrainEngineConfig(
            path=source,
            dtype="float32",
            optimizer=None,
            lora=adapters,
            scalar=scalar,
        )
    )
    engine.initialize()
    try:
        engine.load_checkpoint(checkpoint)
        engine.save(folder, serving_dtype("auto", Path(source), gpu=False))
        if adapters is not None:
            lora.write(engine.model.hf, folder / "adapter", source)
    finally:
        engine.destroy()
    step = json.loads((checkpoint / "done.json").read_text("utf-8"))["extra"]["step"]
    results = config_file.parent / "trainer.json"
    measured = (
        json.loads(results.read_text("utf-8")).get(EVALUATIONS, []) if results.is_file() else []
    )
    (folder / "README.md").write_text(card(config, step, measured, scalar=scalar), "utf-8")


def card(config: GRPOConfig, step: int, evaluations: list[dict[str, Any]], *, scalar: bool) -> str:
    """Returns the model card: where the weights come from, and how they were evaluated.

    Args:
        config: The run's.
        step: The checkpoint's step.
        evaluations: Those of the run; the card has those of this step.
        scalar: The model returns one number, like a reward model.
    """
    found = [each for each in evaluations if each["step"] == step]
    rows = [
        f"| {each['name']} | {each['mean']:.4f} {over_rows(each)}".rstrip() + " |" for each in found
    ]
    table = ["", "| held-out reward | mean |", "|---|---|", *rows] if rows else []
    how, data, batch = f"`{config.algorithm}`", "", config.train_dataset.batch_size
    units = f"{batch} groups of {config.gconfig.n_samples} samples"
    if config.offline:
        how = f"the recipe `{Path(config.recipe).name}`, on dataset rows only"
        units = f"{batch} rows"
    else:
        data = (
            f"; answers of up to {config.gconfig.max_new_tokens} tokens at temperature "
            f"{config.gconfig.temperature}"
        )
    kind = ["- A reward model: a sequence classifier with one class, the score."]
    return "\n".join(
        [
            "---",
            f"tags: [{'areal' if config.offline else 'reinforcement-learning, areal'}]",
            "---",
            f"# {config.experiment_name}/{config.trial_name}, step {step}",
            "",
            *(kind if scalar else []),
            f"- Trained from `{config.model.path}` with {how}: step {step} of "
            f"{config.total_train_steps}, {units} a step.",
            f"- Data: `{config.train_dataset.path}`{data}.",
            *table,
            "",
        ]
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    try:
        export(*(Path(each) for each in sys.argv[1:5]))
    except Exception as failure:
        if removed(Path(sys.argv[2])):  # the caller sees that, too, and says so or takes another
            sys.exit(2)
        if not isinstance(failure, ArealError):
            raise
        print(failure, file=sys.stderr)  # noqa: T201
        sys.exit(2)
