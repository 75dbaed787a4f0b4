"""A tool: a tiny model learns to ask a calculator rather than to guess a product.

    areal run examples/tool_calculator.py                  # on a laptop's CPU
    areal run examples/tool_calculator.py control=true     # control run: shuffled rewards

`ToolWorkflow` lets the model call `calc`, a function of this file, and shows it the result. The
model cannot multiply by itself. After the warm-up, it calls the calculator about every second time
and guesses otherwise. Training must teach it to call the calculator every time, and to copy the
numbers without a mistake. The loss covers the call and the answer, not the result between them.
"""

import random
import re
from dataclasses import dataclass
from pathlib import Path

from areal import (
    FSDPPPOActor,
    GenerationHyperparameters,
    GRPOConfig,
    RemoteSGLangEngine,
    StatefulLoader,
    ToolWorkflow,
    WeightUpdateMeta,
    load_expr_config,
    shuffle_rewards,
)
from areal.datasets.heldout import hold_out


@dataclass
class Config(GRPOConfig):
    """Keys of the experiment file: those of GRPOConfig, and the recipe's own."""

    control: bool = False
    """Control run: shuffle the rewards of each batch, so that accuracy cannot rise."""
    train_problems: int = 4000
    heldout_problems: int = 200
    warm_start_loss: float = 0.05
    """The first part of the warm-up, conversations with calls, ends at this loss per token."""
    warm_start_steps: int = 400
    """The first part ends after this many steps at the latest."""
    guess_steps: int = 20
    """Number of steps of the second part, in which every second conversation is a guess."""


def calc(x: str) -> int:
    """Multiplies two numbers, such as 42*34."""
    factors = re.fullmatch(r"(\d{1,9})\*(\d{1,9})", x)
    if factors is None:
        raise ValueError("expected a product such as 42*34")
    return int(factors[1]) * int(factors[2])


def problems(config: Config) -> tuple[list[dict], list[dict]]:
    """Disjoint train and held-out rows with products of four digits: {"prompt": "94*27=", …}."""
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100) if a * b >= 1000]
    random.Random(config.seed).shuffle(pairs)
    rows = [{"prompt": f"{a}*{b}=", "answer": str(a * b)} for a, b in pairs]
    train, heldout = hold_out(rows, config.heldout_problems, name="heldout_problems")
    return train[: config.train_problems], heldout


def reward_fn(prompt, completions, prompt_ids, completion_ids, answer, **data) -> float:
    """1 for the right product, else 0. Runs in a reward worker."""
    return float(completions.strip() == answer)


def main(argv):
    config, _ = load_expr_config(argv, Config)
    train, heldout = problems(config)

    rollout = RemoteSGLangEngine(config.rollout)
    actor = FSDPPPOActor(config.actor)
    workflow = ToolWorkflow([calc], reward_fn, config.gconfig, max_turns=2)
    one_sample = ToolWorkflow(
        [calc],
        reward_fn,
        GenerationHyperparameters(max_new_tokens=config.gconfig.max_new_tokens),
        max_turns=2,
    )
    dataloader = StatefulLoader(train, seed=config.seed)

    rollout.evaluate(heldout, one_sample, name="heldout_before")
    for step in range(actor.get_version(), config.total_train_steps):
        batch = rollout.prepare_batch(dataloader, workflow=workflow)
        if config.control:
            shuffle_rewards(batch, seed=step)
        actor.compute_advantages(batch)
        actor.ppo_update(batch)
        actor.upload_weights(WeightUpdateMeta.from_disk())
    rollout.evaluate(heldout, one_sample, name="heldout_after")


# -- model: created once, at the start ----------------------------------------------------------

OPENING, CLOSING = '<tool_call>{"name": "calc", "arguments": {"x": "', '"}}</tool_call>'
"""The two ends of a call in Qwen's format. Each is one token, so that an answer is short."""


def demonstration(row: dict, draw: random.Random, *, calls: bool) -> list[dict]:
    """A conversation that calls the calculator, or a guess: some product of two numbers."""
    problem = {"role": "user", "content": row["prompt"]}
    if not calls:
        guess = str(draw.randrange(32, 100) * draw.randrange(32, 100))
        return [problem, {"role": "assistant", "content": guess}]
    expression = row["prompt"].removesuffix("=")
    return [
        problem,
        {"role": "assistant", "content": f"{OPENING}{expression}{CLOSING}"},
        {"role": "tool", "content": row["answer"]},
        {"role": "assistant", "content": row["answer"]},
    ]


def prepare_model(config: Config) -> None:
    """Creates a Qwen2 of 0.6 M parameters that calls the calculator every second time."""
    from areal.config.training import OptimizerConfig, TrainEngineConfig
    from areal.datasets.chats import chat_unit
    from areal.tokenizer import Tokenizer
    from areal_torch.algorithms.packing import pack
    from areal_torch.engines.sft import FSDPLMEngine
    from areal_torch.models.tiny import make_tiny_model

    if (Path(config.model.path) / "model.safetensors").exists():
        return
    texts = ("<|tool|>", OPENING, CLOSING)
    fresh = make_tiny_model(f"{config.model.path}-fresh", seed=config.seed, texts=texts)
    optimizer = OptimizerConfig(lr=2e-3, beta2=0.95, weight_decay=0, warmup_steps_proportion=0.05)
    engine = FSDPLMEngine(TrainEngineConfig(path=str(fresh), optimizer=optimizer))
    engine.initialize(total_train_steps=config.warm_start_steps + config.guess_steps)
    tokenizer, draw, loss = Tokenizer.load(fresh), random.Random(config.seed), 5.0
    rows = problems(config)[0]

    def learn(every: int) -> float:
        """One step on 64 conversations; one in `every` calls the calculator. Returns the loss."""
        drawn = enumerate(draw.sample(rows, 64))
        chats = [demonstration(row, draw, calls=number % every == 0) for number, row in drawn]
        units = [chat_unit(tokenizer, chat) for chat in chats]
        return engine.train_lm(pack([each for unit in units for each in unit]))["loss"]

    for step in range(config.warm_start_steps):
        loss += 0.1 * (learn(1) - loss)
        if step % 25 == 0:
            print(
                f"warm start, step {step}: loss {loss:.2f} (until {config.warm_start_loss})",
                flush=True,
            )
        if loss <= config.warm_start_loss:
            break
    for _ in range(config.guess_steps):
        learn(2)
    engine.save(config.model.path)
    engine.destroy()
