r"""Fine-tuning on worked answers to grade-school mathematics, without servers or rollouts.

    areal run examples/gsm8k_sft.py                        # a tiny model, generated problems, a CPU
    areal run examples/gsm8k_sft.py model.path=hf://Qwen/Qwen2.5-0.5B \
        train_dataset.path=hf://openai/gsm8k/main actor.optimizer.lr=1e-5   # or a folder
    areal run examples/gsm8k_sft.py actor.lora={} actor.optimizer.lr=1e-2   # adapters only

Rows are GSM8K's {"question", "answer"}, or chats: {"messages": [{"role", "content"}, …],
"tools": […] if they have some}. The loss covers the assistant's turns. Held-out rows are those of
the split `test`; they are held out of the file if the rows are a single file. The model is written
to runs/…/model, a folder that transformers and SGLang can load.
"""

import random
from dataclasses import dataclass
from pathlib import Path

from areal import GRPOConfig, OfflineTrainer, load_expr_config
from areal.datasets.chats import chat_units
from areal.datasets.heldout import hold_out, train_and_heldout
from areal.tokenizer import Tokenizer

GENERATED = "generated"


@dataclass
class Config(GRPOConfig):
    """Keys of the experiment file: those of GRPOConfig, and the recipe's own."""

    heldout_rows: int = 200
    """Number of rows to evaluate on, which are not trained on; 0: no evaluation."""
    evaluate_steps: int = 50
    """Steps between two evaluations."""


def chat_of(row: dict) -> dict:
    """Returns a row with a chat: a GSM8K row is converted; a chat stays as it is."""
    if "messages" in row:
        return row
    question = {"role": "user", "content": row["question"]}
    return {"messages": [question, {"role": "assistant", "content": row["answer"]}]}


def main(argv):
    config, _ = load_expr_config(argv, Config)
    from areal_torch.engines.sft import evaluate_lm, train_lm

    model = OfflineTrainer(config.actor)
    tokenizer = Tokenizer.load(Path(config.model.path))

    train, heldout = (
        chat_units(tokenizer, [chat_of(row) for row in rows]) for rows in rows_of(config)
    )

    def evaluate(name: str) -> None:
        if heldout:
            model.record(name, evaluate_lm(model.engine, model.chunks(heldout)))

    if model.step == 0:
        evaluate("heldout_loss_before")
    for batch in model.batches(train):
        model.finish_step(train_lm(model.engine, batch))
        if model.step % config.evaluate_steps == 0:
            evaluate("heldout_loss")
    evaluate("heldout_loss_after")
    model.save()


# -- data and model that need no download ------------------------------------------------------


def rows_of(config: Config) -> tuple[list[dict], list[dict]]:
    """Returns train and held-out rows: read from an address, or generated in GSM8K's format."""
    if config.train_dataset.path != GENERATED:
        return train_and_heldout(config.train_dataset.path, config.heldout_rows)
    generator = random.Random(config.seed)
    rows = []
    for _ in range(4000):
        a, b = generator.randint(2, 9), generator.randint(2, 9)
        name, what = generator.choice(["Tom", "Ada"]), generator.choice(["pens", "figs"])
        rows.append(
            {
                "question": f"{name} has {a} {what} and buys {b}. How many?",
                "answer": f"{a} + {b} = <<{a}+{b}={a + b}>>{a + b} {what}.\n#### {a + b}",
            }
        )
    return hold_out(rows, config.heldout_rows)


def prepare_model(config: Config) -> None:
    """Creates a Qwen2 of 0.6 M parameters."""
    from areal_torch.models.tiny import make_tiny_model

    make_tiny_model(Path(config.model.path), seed=config.seed)
