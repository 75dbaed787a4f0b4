r"""DPO, IPO or SimPO: a model learns from pairs of answers, without servers or rollouts.

    areal run examples/dpo.py                              # a tiny model, generated pairs, a CPU
    areal run examples/dpo.py loss=simpo                   # dpo, ipo or simpo
    areal run examples/dpo.py model.path=hf://Qwen/Qwen2.5-0.5B-Instruct \
        train_dataset.path=pairs.jsonl actor.optimizer.lr=1e-6 beta=0.1
    areal run examples/dpo.py actor.lora={} actor.optimizer.lr=3e-3   # the reference is the actor
                                                                      # without its adapters

Rows are {"prompt", "chosen", "rejected"}, and "tools" if they have some: texts, or lists of
messages, in any of the forms that `pair_unit` lists. The last rows of the file are held out.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from areal import GRPOConfig, OfflineTrainer, load_expr_config
from areal.datasets.chats import pair_units
from areal.datasets.preferences import GENERATED, sorted_digits
from areal.datasets.rows import load_rows
from areal.tokenizer import Tokenizer


@dataclass
class Config(GRPOConfig):
    """Keys of the experiment file: those of GRPOConfig, and the recipe's own."""

    loss: Literal["dpo", "ipo", "simpo"] = "dpo"
    beta: float = 0.1
    """A larger value keeps the policy closer to the reference; in SimPO it scales the reward."""
    gamma: float = 0.5
    """SimPO's target margin."""
    heldout_rows: int = 200


def main(argv):
    config, _ = load_expr_config(argv, Config)
    from areal.engines.offline import frozen
    from areal.engines.preference import Preference

    model = OfflineTrainer(config.actor)
    preference = Preference(config.loss, config.beta, config.gamma)
    adapted = config.actor.lora is not None
    reference = model.engine
    if preference.needs_reference and not adapted:
        reference = frozen(config.actor)
    tokenizer = Tokenizer.load(Path(config.model.path))
    rows = (
        sorted_digits(3000, config.seed)
        if config.train_dataset.path == GENERATED
        else load_rows(config.train_dataset.path)
    )
    units = pair_units(tokenizer, rows)
    train, heldout = units[: -config.heldout_rows], units[-config.heldout_rows :]

    def compare(batch) -> None:
        """Adds the reference model's logprobs of the answers to a batch."""
        if preference.needs_reference:
            with model.engine.without_adapters() if adapted else nullcontext():
                batch["reference_logprobs"] = reference.forward(batch)

    for batch in model.batches(train):
        compare(batch)
        model.finish_step(preference.train(model.engine, batch))
    found = []
    for batch in model.chunks(heldout):
        compare(batch)
        found.append(preference.evaluate(model.engine, batch))
    for name in ("loss", "accuracy", "margin"):
        model.record(f"heldout_{name}", [each[name] for each in found])
    model.save()


def prepare_model(config: Config) -> None:
    """Creates a Qwen2 of 0.6 M parameters."""
    from areal.models.tiny import make_tiny_model

    make_tiny_model(Path(config.model.path), seed=config.seed)
