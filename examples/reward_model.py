r"""A reward model trained on pairs of answers (Bradley-Terry), without servers or rollouts.

    areal run examples/reward_model.py                     # a tiny model, generated pairs, a CPU
    areal run examples/reward_model.py model.path=hf://Qwen/Qwen2.5-0.5B \
        train_dataset.path=pairs.jsonl actor.optimizer.lr=1e-5
    areal run examples/reward_model.py actor.lora={} actor.optimizer.lr=3e-3

Rows are {"prompt", "chosen", "rejected"}, and "tools" if they have some: texts, or lists of
messages, in any of the forms that `pair_unit` lists. The last rows of the file are held out.
The model is written to runs/…/model: a sequence classifier with one class.
"""

from dataclasses import dataclass
from pathlib import Path

from areal import GRPOConfig, OfflineTrainer, load_expr_config
from areal.datasets.chats import pair_units
from areal.datasets.preferences import GENERATED, sorted_digits
from areal.datasets.rows import load_rows
from areal.tokenizer import Tokenizer


@dataclass
class Config(GRPOConfig):
    """Keys of the experiment file: those of GRPOConfig, and the recipe's own."""

    heldout_rows: int = 200


def main(argv):
    config, _ = load_expr_config(argv, Config)
    from areal.engines.reward_model import evaluate_reward_model, train_reward_model

    model = OfflineTrainer(config.actor, scalar=True)
    tokenizer = Tokenizer.load(Path(config.model.path))
    rows = (
        sorted_digits(3000, config.seed)
        if config.train_dataset.path == GENERATED
        else load_rows(config.train_dataset.path)
    )
    units = pair_units(tokenizer, rows)
    train, heldout = units[: -config.heldout_rows], units[-config.heldout_rows :]

    for batch in model.batches(train):
        model.finish_step(train_reward_model(model.engine, batch))
    found = [evaluate_reward_model(model.engine, batch) for batch in model.chunks(heldout)]
    for name in ("loss", "accuracy", "margin"):
        model.record(f"heldout_{name}", [each[name] for each in found])
    model.save()


def prepare_model(config: Config) -> None:
    """Creates a Qwen2 of 0.6 M parameters."""
    from areal.models.tiny import make_tiny_model

    make_tiny_model(Path(config.model.path), seed=config.seed)
