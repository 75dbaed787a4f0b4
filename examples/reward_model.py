r"""A reward model trained on pairs of answers (Bradley-Terry), without servers or rollouts.

    areal run examples/reward_model.py                     # a tiny model, generated pairs, a CPU
    areal run examples/reward_model.py model.path=hf://Qwen/Qwen2.5-0.5B \
        train_dataset.path=pairs.jsonl actor.optimizer.lr=1e-5
    areal run examples/reward_model.py actor.lora={} actor.optimizer.lr=3e-3

Rows are {"prompt", "chosen", "rejected"}, and "tools" if they have some: texts, or lists of
messages, in any of the forms that `pair_unit` lists. Held-out rows are those of the split `test`;
they are held out of the file if the rows are a single file. The model is written to
runs/…/model: a sequence classifier with one class.
"""

from dataclasses import dataclass
from pathlib import Path

from areal import GRPOConfig, OfflineTrainer, load_expr_config
from areal.datasets.chats import pair_units
from areal.datasets.heldout import hold_out, train_and_heldout
from areal.datasets.preferences import GENERATED, sorted_digits
from areal.tokenizer import Tokenizer


@dataclass
class Config(GRPOConfig):
    """Keys of the experiment file: those of GRPOConfig, and the recipe's own."""

    heldout_rows: int = 200
    """Number of rows to evaluate on, which are not trained on; 0: no evaluation."""


def main(argv):
    config, _ = load_expr_config(argv, Config)
    from areal_torch.engines.reward_model import evaluate_reward_model, train_reward_model

    model = OfflineTrainer(config.actor, scalar=True)
    tokenizer = Tokenizer.load(Path(config.model.path))
    path, count = config.train_dataset.path, config.heldout_rows
    parts = (
        hold_out(sorted_digits(3000, config.seed), count)
        if path == GENERATED
        else train_and_heldout(path, count)
    )
    train, heldout = (pair_units(tokenizer, rows) for rows in parts)

    for batch in model.batches(train):
        model.finish_step(train_reward_model(model.engine, batch))
    if heldout:
        for name, value in evaluate_reward_model(model.engine, model.chunks(heldout)).items():
            model.record(f"heldout_{name}", value)
    model.save()


def prepare_model(config: Config) -> None:
    """Creates a Qwen2 of 0.6 M parameters."""
    from areal_torch.models.tiny import make_tiny_model

    make_tiny_model(Path(config.model.path), seed=config.seed)
