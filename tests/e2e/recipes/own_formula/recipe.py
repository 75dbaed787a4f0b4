"""Trains with the built-in GRPO, or with the recipe's own copy of its formulas, on equal batches.

Every answer is fixed: nothing is sampled, so two runs differ only in what they compute.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from areal import (
    FSDPPPOActor,
    GRPOConfig,
    RemoteSGLangEngine,
    WeightUpdateMeta,
    load_expr_config,
)
from areal.types import Trajectory
from areal.workflows.base import RolloutWorkflow

from .formulas import clipped, of_the_group

PROMPT, ANSWER = 4, 6
"""Tokens of each."""


@dataclass
class Config(GRPOConfig):
    """The keys of GRPOConfig, and the recipe's own."""

    own: bool = True
    """Whether the loss and the advantages are the recipe's."""
    low: float = 0.1
    high: float = 0.2


class Fixed(RolloutWorkflow):
    """Returns a group of answers that depend on the row only."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    async def arun_episode(self, engine, data):
        random = np.random.default_rng([data["row"], data["version"]])
        prompt = random.integers(1, 250, PROMPT)
        return [self.answer(random, prompt, data["version"]) for _ in range(self.samples)]

    def answer(self, random, prompt, version):
        mask = np.arange(PROMPT + ANSWER) >= PROMPT
        tokens = np.concatenate([prompt, random.integers(1, 250, ANSWER)])
        rewards = np.zeros(len(tokens), np.float32)
        rewards[-1] = random.integers(0, 3)
        return Trajectory(
            trajectory_id="",
            input_ids=tokens.astype(np.int32),
            loss_mask=mask,
            behavior_logprobs=np.where(mask, random.uniform(-7, -4, len(mask)), 0).astype("f4"),
            token_versions=np.where(mask, version, -1).astype(np.int32),
            rewards=rewards,
        )


def main(argv):
    config, _ = load_expr_config(argv, Config)
    rollout = RemoteSGLangEngine(config.rollout)
    loss = partial(clipped, low=config.low, high=config.high) if config.own else None
    advantages = of_the_group if config.own else None
    actor = FSDPPPOActor(config.actor, loss=loss, advantages=advantages)
    workflow = Fixed(config.gconfig.n_samples)
    for version in range(actor.get_version(), config.total_train_steps):
        groups = range(config.train_dataset.batch_size)
        rows = [{"row": row, "version": version} for row in groups]
        batch = rollout.rollout_batch(rows, workflow=workflow)
        actor.compute_advantages(batch)
        actor.record({"my/advantage": batch["advantages"].abs().mean()})
        actor.ppo_update(batch)
        actor.upload_weights(WeightUpdateMeta.from_disk())


def prepare_model(config):
    from areal_torch.models.tiny import make_tiny_model

    if not (Path(config.model.path) / "model.safetensors").exists():
        make_tiny_model(config.model.path, seed=config.seed)
