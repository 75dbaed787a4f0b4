"""Your own mathematics: a loss, an advantage and a metric in the recipe, on two-digit addition.

    areal run examples/own_loss.py                         # learns
    areal run examples/own_loss.py control=true            # control run: shuffled rewards
    areal run examples/own_loss.py width=0.5 pull=0.0      # other constants

Everything around them works as for a built-in loss: the weight of stale tokens, minibatches, KL
terms, clipped gradients, metrics, and the replay of a failed step.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from areal import (
    FSDPPPOActor,
    GRPOConfig,
    RemoteSGLangEngine,
    RLVRWorkflow,
    StatefulLoader,
    WeightUpdateMeta,
    load_expr_config,
    shuffle_rewards,
)
from areal.datasets.arithmetic import addition


@dataclass
class Config(GRPOConfig):
    """Keys of the experiment file: those of GRPOConfig, and the recipe's own."""

    width: float = 0.2
    """The loss's constant: a token whose ratio is further from 1 is pulled back."""
    pull: float = 1.0
    """The loss's constant: how hard it is pulled."""
    control: bool = False
    """Control run: shuffle the rewards of each batch, so that accuracy cannot rise."""
    train_problems: int = 6000
    heldout_problems: int = 500
    warm_start_loss: float = 0.4
    """The warm-up ends at this loss, at which about 2 of 5 sampled answers are right."""
    warm_start_steps: int = 600
    """The warm-up ends after this many steps at the latest."""


# -- mathematics: tensors have one entry per token [T], or one per sequence [S] -----------------


def soft_wall(policy_logprobs, proximal_logprobs, advantages, *, width, pull):
    """A loss for each token: the ratio times the advantage, with a wall instead of a clip."""
    ratio = (policy_logprobs - proximal_logprobs).exp()
    beyond = ((ratio - 1).abs() - width).clamp(min=0)
    return -advantages * ratio + pull * beyond**2, {"my/beyond": beyond > 0}


def against_the_median(rewards, group_index):
    """An advantage for each sequence: its reward less the middle one of its group."""
    center = rewards.clone()
    for group in group_index.unique():
        center[group_index == group] = rewards[group_index == group].quantile(0.5)
    return rewards - center


# -- reward and loop ----------------------------------------------------------------------------


def problems(config: Config) -> tuple[list[dict], list[dict]]:
    """Disjoint train and held-out rows: {"messages": "94+27=", "answer": "121"}."""
    return addition(
        2, train=config.train_problems, heldout=config.heldout_problems, seed=config.seed
    )


def reward_fn(completions, answer, **data) -> float:
    """1 for the right sum (leading zeros allowed), else 0."""
    return float(completions.strip().lstrip("0") == answer)


def main(argv):
    config, _ = load_expr_config(argv, Config)
    train, heldout = problems(config)
    rollout = RemoteSGLangEngine(config.rollout)
    loss = partial(soft_wall, width=config.width, pull=config.pull)
    actor = FSDPPPOActor(config.actor, loss=loss, advantages=against_the_median)
    workflow = RLVRWorkflow(reward_fn, config.gconfig)
    dataloader = StatefulLoader(train, seed=config.seed)

    rollout.evaluate(heldout, workflow, name="heldout_before")
    for step in range(actor.get_version(), config.total_train_steps):
        batch = rollout.prepare_batch(dataloader, workflow=workflow)
        if config.control:
            shuffle_rewards(batch, seed=step)
        actor.compute_advantages(batch)
        right = batch["advantages"][batch["loss_mask"]] > 0
        actor.record({"my/share_raised": right.float().mean()})
        actor.ppo_update(batch)
        actor.upload_weights(WeightUpdateMeta.from_disk())
    rollout.evaluate(heldout, workflow, name="heldout_after")


# -- model: created once, at the start ----------------------------------------------------------


def prepare_model(config: Config) -> None:
    """Creates a Qwen2 of 0.6 M parameters and teaches it the format and some of the sums."""
    import random

    from areal.config.training import OptimizerConfig, TrainEngineConfig
    from areal.tokenizer import Tokenizer
    from areal_torch.engines.sft import FSDPLMEngine, pack_examples
    from areal_torch.models.tiny import make_tiny_model

    if (Path(config.model.path) / "model.safetensors").exists():
        return
    fresh = Path(f"{config.model.path}-fresh")
    make_tiny_model(fresh, seed=config.seed)
    optimizer = OptimizerConfig(lr=2e-3, beta2=0.95, weight_decay=0, warmup_steps_proportion=0.07)
    engine = FSDPLMEngine(TrainEngineConfig(path=str(fresh), optimizer=optimizer))
    engine.initialize(total_train_steps=config.warm_start_steps)
    tokenizer = Tokenizer.load(fresh)
    examples = [
        (
            tokenizer.apply_chat_template(row["messages"]),
            [*tokenizer.encode(row["answer"].zfill(3)), tokenizer.eos_token_id],
        )
        for row in problems(config)[0]
    ]
    rng, loss = random.Random(config.seed), 5.0
    for _ in range(config.warm_start_steps):
        loss += 0.1 * (engine.train_lm(pack_examples(rng.sample(examples, 128)))["loss"] - loss)
        if loss <= config.warm_start_loss:
            break
    engine.save(config.model.path)
    engine.destroy()
