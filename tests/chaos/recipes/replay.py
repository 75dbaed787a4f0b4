"""A training loop that writes down what it trains on, for the tests of replay.

`seen.jsonl` in the run folder gets a line per rank and step, before the step is taken: a digest of
every group of the batch. With `gradients` set, step 1's gradients go to that file; at the end the
weights go to `final/`.
"""

import hashlib
import json
import os
import time
from dataclasses import dataclass

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

KEYS = ("input_ids", "loss_mask", "behavior_logprobs", "token_versions", "rewards")


@dataclass
class Config(GRPOConfig):
    """What the tests vary."""

    noise: bool = False
    """Let python's, numpy's and torch's generators take part in the training signal."""
    pace_s: float = 0.0
    """Sleep per step: room for a kill."""
    endless_step: int = 0
    """This step sleeps until it is killed, so that no run ends before its kills."""
    gradients: str = ""


def reward_fn(prompt, completions, prompt_ids, completion_ids, answer, **data) -> float:
    return float(completions.strip().lstrip("0") == answer)


def group_digests(batch) -> list[str]:
    """One digest per group of a packed batch: of every number that it is made of."""
    digests = {}
    bounds = batch["cu_seqlens"].tolist()
    for start, end, group in zip(bounds, bounds[1:], batch["group_index"].tolist(), strict=False):
        digest = digests.setdefault(group, hashlib.sha256())
        for key in KEYS:
            digest.update(batch[key][start:end].numpy().tobytes())
    return [digest.hexdigest()[:16] for digest in digests.values()]


def keep_gradients(actor, path):
    """Writes the gradients of the first optimizer step, gathered."""
    from safetensors.torch import save_file

    names = {parameter: name for name, parameter in actor.engine.model.named_parameters()}

    def hook(optimizer, *_):
        found = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                grad = parameter.grad
                grad = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
                found[names[parameter]] = grad.clone().contiguous()
        if actor.session.rank == 0:
            save_file(found, path)
        handle.remove()

    handle = actor.engine.step.optimizer.register_step_pre_hook(hook)


def main(argv):
    import random

    import numpy as np
    import torch

    config, _ = load_expr_config(argv, Config)
    rollout = RemoteSGLangEngine(config.rollout)
    actor = FSDPPPOActor(config.actor)
    session = actor.session
    # Drawn before the loop, in a fresh and in a resumed run alike.
    offset = random.random() + np.random.rand() + float(torch.rand(())) if config.noise else 0.0
    loader = StatefulLoader(addition(2, train=2000, heldout=0, seed=0)[0], seed=config.seed)
    workflow = RLVRWorkflow(reward_fn, config.gconfig)
    if config.gradients and actor.get_version() == 0:
        keep_gradients(actor, f"{config.gradients}-{session.incarnation}.safetensors")
    seen = config.run_dir / "seen.jsonl"
    for step in range(actor.get_version() + 1, config.total_train_steps + 1):
        batch = rollout.prepare_batch(loader, workflow)
        line = {
            "incarnation": session.incarnation,
            "rank": session.rank,
            "ranks": session.world_size,
            "step": step,
            "groups": group_digests(batch),
        }
        with seen.open("ab") as file:
            file.write(json.dumps(line).encode() + b"\n")
        if config.noise:
            noise = offset + random.gauss(0, 1) + np.random.standard_normal() + torch.randn(())
            batch["rewards"] = batch["rewards"] * (1 + noise**2)
        actor.compute_advantages(batch)
        actor.ppo_update(batch)
        time.sleep(900 if step == config.endless_step else config.pace_s)
        actor.upload_weights(WeightUpdateMeta.from_disk())
    actor.engine.save(config.run_dir / "final")
    assert os.environ.get("OMP_NUM_THREADS") == "1"  # one thread: the same sums in the same order
