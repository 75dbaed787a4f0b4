"""From the third step on, the last rank's advantages are not numbers."""

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


def reward_fn(prompt, completions, prompt_ids, completion_ids, **data):
    return 0.1 * len(completion_ids)


def main(argv):
    config, _ = load_expr_config(argv, GRPOConfig)
    config.actor.optimizer.max_skipped_steps = 2
    rollout, actor = RemoteSGLangEngine(config.rollout), FSDPPPOActor(config.actor)
    loader = StatefulLoader(addition(1, train=80, heldout=0, seed=0)[0], seed=0)
    workflow = RLVRWorkflow(reward_fn=reward_fn, gconfig=config.gconfig)
    for step in range(actor.get_version(), config.total_train_steps):
        batch = rollout.prepare_batch(loader, workflow=workflow)
        actor.compute_advantages(batch)
        last = actor.engine.rank == actor.engine.world_size - 1
        if step >= 2 and last:
            batch["advantages"] *= float("nan")
        actor.ppo_update(batch)
        actor.upload_weights(WeightUpdateMeta.from_disk())
