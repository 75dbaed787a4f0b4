r"""DPO, IPO or SimPO: a model learns from pairs of answers, without servers or rollouts.

    areal run examples/dpo.py                              # a tiny model, generated pairs, a CPU
    areal run examples/dpo.py loss=simpo                   # dpo, ipo or simpo
    areal run examples/dpo.py model.path=hf://Qwen/Qwen2.5-0.5B-Instruct \
        train_dataset.path=pairs.jsonl actor.optimizer.lr=1e-6 beta=0.1
    areal run examples/dpo.py actor.lora={} actor.optimizer.lr=3e-3   # the reference is the actor
                                                                      # without its adapters

Rows are {"prompt", "chosen", "rejected"}, and "tools" if they have some: texts, or lists of
messages, in any of the forms that `pair_unit` lists. Held-out rows are those of the split `test`;
they are held out of the file if the rows are a single file.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from areal import GRPOConfig, OfflineTrainer, load_expr_config
from areal.datasets.chats import pair_units
from areal.datasets.heldout import hold_out, train_and_heldout
from areal.datasets.preferences import GENERATED, sorted_digits
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
    """Number of rows to evaluate on, which are not trained on; 0: no evaluation."""


def main(argv):
    config, _ = load_expr_config(argv, Config)
    from areal_torch.engines.offline import frozen
    from areal_torch.engines.preference import Preference

    model = OfflineTrainer(config.actor)
    preference = Preference(config.loss, config.beta, config.gamma)
    adapted = config.actor.lora is not None
    reference = model.engine
    if preference.needs_reference and not adapted:
        reference = frozen(config.actor)
    tokenizer = Tokenizer.load(Path(config.model.path))
    path, count = config.train_dataset.path, config.heldout_rows
    parts = (
        hold_out(sorted_digits(3000, config.seed), count)
        if path == GENERATED
        else train_and_heldout(path, count)
    )
    train, heldout = (pair_units(tokenizer, rows) for rows in parts)

    def compared(batches):
        """Adds the reference model's logprobs of the answers to each batch."""
        for batch in batches:
            if preference.needs_reference:
                with model.engine.without_adapters() if adapted else nullcontext():
                    batch["reference_logprobs"] = reference.forward(batch)
            yield batch

    for batch in compared(model.batches(train)):
        model.finish_step(preference.train(model.engine, batch))
    if heldout:
        found = preference.evaluate(model.engine, compared(model.chunks(heldout)))
        for name, value in found.items():
            model.record(f"heldout_{name}", value)
    model.save()


def prepare_model(config: Config) -> None:
    """Creates a Qwen2 of 0.6 M parameters."""
    from areal_torch.models.tiny import make_tiny_model

    make_tiny_model(Path(config.model.path), seed=config.seed)
