"""A policy learns to sample even token ids; in some steps the recipe waits for a test.

`gate` is a folder. In each step of `gate_steps`, once the model is in use, rank 0 creates the file
at-STEP there and waits for go-STEP.
"""

import time
from dataclasses import dataclass, field
from pathlib import Path

from areal import (
    FSDPPPOActor,
    GRPOConfig,
    RemoteSGLangEngine,
    RLVRWorkflow,
    StatefulLoader,
    WeightUpdateMeta,
    load_expr_config,
)
from areal.datasets.arithmetic import addition


@dataclass
class Config(GRPOConfig):
    gate: str = ""
    gate_steps: list[int] = field(default_factory=list)


def reward_fn(prompt, completions, prompt_ids, completion_ids, **data):
    return sum(token % 2 == 0 for token in completion_ids) / max(len(completion_ids), 1)


def prepare_model(config):
    from areal_torch.models.tiny import make_tiny_model

    if not (Path(config.model.path) / "model.safetensors").exists():
        make_tiny_model(config.model.path, seed=config.seed)


def wait_at(gate: Path, step: int) -> None:
    (gate / f"at-{step}").touch()
    deadline = time.monotonic() + 150.0
    while not (gate / f"go-{step}").exists():
        assert time.monotonic() < deadline, f"no go-{step} within 150 s"
        time.sleep(0.05)


def main(argv):
    config, _ = load_expr_config(argv, Config)
    rollout = RemoteSGLangEngine(config.rollout)
    actor = FSDPPPOActor(config.actor)
    workflow = RLVRWorkflow(reward_fn=reward_fn, gconfig=config.gconfig)
    train, heldout = addition(2, train=400, heldout=8, seed=0)
    loader = StatefulLoader(train, seed=config.seed)
    for step in range(actor.get_version() + 1, config.total_train_steps + 1):
        batch = rollout.prepare_batch(loader, workflow=workflow)
        actor.compute_logprobs(batch)
        if step in config.gate_steps and actor.engine.rank == 0:
            wait_at(Path(config.gate), step)
        actor.compute_advantages(batch)
        actor.ppo_update(batch)
        if step == 3:  # in the middle of a step, between the update and the next version
            rollout.evaluate(heldout, workflow, name="heldout", version=step - 1)
        actor.upload_weights(WeightUpdateMeta())
