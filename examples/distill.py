r"""Distillation: a student learns what its teacher would say, without servers or rollouts.

    areal run examples/distill.py                          # two tiny models, generated rows, a CPU
    areal run examples/distill.py model.path=hf://Qwen/Qwen2.5-0.5B \
        teacher=/models/Qwen2.5-7B-Instruct train_dataset.path=chats.jsonl actor.optimizer.lr=1e-5
    areal run examples/distill.py actor.lora={} actor.optimizer.lr=1e-2   # adapters only

Rows are chats: {"messages": [{"role", "content"}, …], "tools": […] if they have some}. Held-out
rows are those of the split `test`; they are held out of the file if the rows are a single file. In
the assistant's turns, the student learns the probabilities of the teacher's `k` likeliest tokens,
not the token in the row. Both models must have the same vocabulary. The trainer loads the teacher
as a frozen model.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from areal import GRPOConfig, OfflineTrainer, load_expr_config
from areal.datasets.chats import chat_units
from areal.datasets.heldout import hold_out, train_and_heldout
from areal.datasets.preferences import GENERATED, sorted_digits
from areal.tokenizer import Tokenizer


@dataclass
class Config(GRPOConfig):
    """Keys of the experiment file: those of GRPOConfig, and the recipe's own."""

    teacher: str = "runs/models/distill-teacher"
    """A Hugging Face folder."""
    teacher_steps: int = 300
    """Number of supervised steps that train the teacher, if this recipe creates it."""
    k: int = 16
    """Number of teacher tokens that the student learns at each position."""
    direction: Literal["forward", "reverse"] = "forward"
    heldout_rows: int = 200
    """Number of rows to evaluate on, which are not trained on; 0: no evaluation."""


def units_of(config: Config, model: str) -> tuple[list, list]:
    """Train and held-out rows as token ids."""
    tokenizer = Tokenizer.load(Path(model))
    path, count = config.train_dataset.path, config.heldout_rows
    if path == GENERATED:
        train, heldout = hold_out(generated(config.seed), count)
    else:
        train, heldout = train_and_heldout(path, count)
    return chat_units(tokenizer, train), chat_units(tokenizer, heldout)


def generated(seed: int) -> list[dict]:
    """Rows of four digits, and the same digits sorted."""
    return [
        {
            "messages": [
                {"role": "user", "content": row["prompt"]},
                {"role": "assistant", "content": row["chosen"]},
            ]
        }
        for row in sorted_digits(3000, seed)
    ]


def main(argv):
    config, _ = load_expr_config(argv, Config)
    from areal_torch.engines.distill import Distillation
    from areal_torch.engines.offline import frozen
    from areal_torch.engines.sft import evaluate_lm

    model = OfflineTrainer(config.actor)
    teacher = frozen(config.actor, config.teacher)
    distillation = Distillation(config.k, config.direction)
    train, heldout = units_of(config, config.model.path)

    def evaluate(name: str, engine) -> None:
        if heldout:
            model.record(name, evaluate_lm(engine, model.chunks(heldout)))

    if model.step == 0:
        evaluate("heldout_loss_teacher", teacher)
        evaluate("heldout_loss_before", model.engine)
    for batch in model.batches(train):
        distillation.ask(teacher, batch)
        model.finish_step(distillation.train(model.engine, batch))
    evaluate("heldout_loss_after", model.engine)
    model.save()


# -- models that need no download --------------------------------------------------------------


def prepare_model(config: Config) -> None:
    """Creates a Qwen2 of 0.6 M parameters, and a teacher that has learned from the rows."""
    import random

    from areal.config.training import OptimizerConfig, TrainEngineConfig
    from areal_torch.algorithms.packing import pack
    from areal_torch.engines.sft import FSDPLMEngine
    from areal_torch.models.tiny import make_tiny_model

    if not (Path(config.teacher) / "model.safetensors").exists():
        fresh = Path(f"{config.teacher}-fresh")
        make_tiny_model(fresh, seed=config.seed + 1)
        optimizer = OptimizerConfig(lr=3e-3, beta2=0.95, weight_decay=0)
        engine = FSDPLMEngine(TrainEngineConfig(path=str(fresh), optimizer=optimizer))
        engine.initialize(total_train_steps=config.teacher_steps)
        train, rng = units_of(config, str(fresh))[0], random.Random(config.seed)
        for _ in range(config.teacher_steps):
            engine.train_lm(pack([each for unit in rng.sample(train, 32) for each in unit]))
        engine.save(config.teacher)
        engine.destroy()
    make_tiny_model(Path(config.model.path), seed=config.seed)
