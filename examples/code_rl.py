r"""Code: a tiny model writes a Python expression, and unit tests score it.

    apt-get install bubblewrap                       # the model's code runs in a box
    areal run examples/code_rl.py                    # on a laptop's CPU
    areal run examples/code_rl.py control=true       # control run: shuffled rewards

The model reads the values f(0) and f(1) of a function f, and writes the body of f, such as `3*x+4`.
Unit tests call f with these and other numbers. The code runs in a box: isolated processes that see
neither the machine's files nor its network (docs/isolation.md). Code that loops, fails or prints
too much gets a reward of 0. 120 steps raise held-out accuracy from 0.64 to 0.88 (seed 0).
"""

import asyncio
import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from areal import (
    FSDPPPOActor,
    GenerationHyperparameters,
    GRPOConfig,
    RemoteSGLangEngine,
    RLVRWorkflow,
    StatefulLoader,
    WeightUpdateMeta,
    group_reward,
    load_expr_config,
    shuffle_rewards,
)
from areal.datasets.heldout import hold_out
from areal.rewards.code import code_reward
from areal.sandbox import Limits, Sandbox


@dataclass
class Config(GRPOConfig):
    """Keys of the experiment file: those of GRPOConfig, and the recipe's own."""

    control: bool = False
    """Control run: shuffle the rewards of each batch, so that accuracy cannot rise."""
    heldout_problems: int = 200
    warm_start_loss: float = 0.15
    """The warm-up ends at this loss, at which about 3 of 5 expressions are right."""
    warm_start_steps: int = 400
    """The warm-up ends after this many steps at the latest."""


# -- reward: does the code pass its tests? -------------------------------------------------------


@cache
def box() -> Sandbox:
    """Returns the box, which each reward worker creates once."""
    return Sandbox()


@group_reward
async def reward_fn(prompt, completions, prompt_ids, completion_ids, tests, **data) -> list[float]:
    """1 for each expression that passes, else 0; equal expressions run only once."""
    different = list(dict.fromkeys(completions))
    limits = Limits(seconds=2, memory_mb=128, processes=4, output_kb=16, disk_mb=1)
    scores = await asyncio.gather(
        *(
            code_reward(box(), body, tests, prefix="def f(x):\n    return ", limits=limits)
            for body in different
        )
    )
    score = dict(zip(different, scores, strict=True))
    return [score[body] for body in completions]


# -- data: functions that the model must guess from two of their values --------------------------


def problems(config: Config) -> tuple[list[dict], list[dict]]:
    """Disjoint train and held-out rows: {"prompt": "f(0)= 4 f(1)=  7", "tests": "assert …"}."""
    lines = [(a, b) for a in range(1, 10) for b in range(100)]
    random.Random(config.seed).shuffle(lines)
    rows = [row(a, b) for a, b in lines]
    return hold_out(rows, config.heldout_problems, name="heldout_problems")


def row(a: int, b: int) -> dict:
    """One problem. `body` is the answer for the warm-up; in training only the tests decide."""
    return {
        "prompt": f"f(0)={b:2} f(1)={a + b:3}",
        "tests": "\n".join(f"assert f({x}) == {a * x + b}" for x in (0, 1, 2, 5, -3)),
        "body": f"{a}*x+{b}",
    }


def main(argv):
    config, _ = load_expr_config(argv, Config)
    train, heldout = problems(config)
    asyncio.run(box().run("pass"))  # fails now if there is no bubblewrap

    rollout = RemoteSGLangEngine(config.rollout)
    actor = FSDPPPOActor(config.actor)
    workflow = RLVRWorkflow(reward_fn, config.gconfig)
    once = GenerationHyperparameters(max_new_tokens=config.gconfig.max_new_tokens)
    one_sample = RLVRWorkflow(reward_fn, once)
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


def prepare_model(config: Config) -> None:
    """Creates a Qwen2 of 0.6 M parameters and teaches it the format and some of the functions."""
    from areal.config.training import OptimizerConfig, TrainEngineConfig
    from areal.tokenizer import Tokenizer
    from areal_torch.engines.sft import FSDPLMEngine, pack_examples
    from areal_torch.models.tiny import make_tiny_model

    if (Path(config.model.path) / "model.safetensors").exists():
        return
    fresh = make_tiny_model(f"{config.model.path}-fresh", seed=config.seed)
    optimizer = OptimizerConfig(lr=2e-3, beta2=0.95, weight_decay=0, warmup_steps_proportion=0.07)
    engine = FSDPLMEngine(TrainEngineConfig(path=str(fresh), optimizer=optimizer))
    engine.initialize(total_train_steps=config.warm_start_steps)
    tokenizer = Tokenizer.load(fresh)
    examples = [
        (
            tokenizer.apply_chat_template([{"role": "user", "content": each["prompt"]}]),
            [*tokenizer.encode(each["body"]), tokenizer.eos_token_id],
        )
        for each in problems(config)[0]
    ]
    draw, loss = random.Random(config.seed), 5.0
    for step in range(config.warm_start_steps):
        loss += 0.1 * (engine.train_lm(pack_examples(draw.sample(examples, 128)))["loss"] - loss)
        if step % 25 == 0:
            print(
                f"warm start, step {step}: loss {loss:.2f} (until {config.warm_start_loss})",
                flush=True,
            )
        if loss <= config.warm_start_loss:
            break
    engine.save(config.model.path)
    engine.destroy()
