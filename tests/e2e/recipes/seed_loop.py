"""The loop of the design documents, as written there, behind a preamble that binds its names."""

from pathlib import Path

from areal import (
    FSDPPPOActor,
    GenerationHyperparameters,
    GRPOConfig,
    RemoteSGLangEngine,
    RLVRWorkflow,
    WeightUpdateMeta,
    load_expr_config,
)
from areal.datasets.arithmetic import addition


def reward_fn(prompt, completions, prompt_ids, completion_ids, **data):
    return float(completions.strip() == data["answer"]) + 0.1 * len(completion_ids)


max_steps = 3
data = addition(1, train=8, heldout=0, seed=0)[0]
workflow = RLVRWorkflow(
    reward_fn=reward_fn, gconfig=GenerationHyperparameters(n_samples=4, max_new_tokens=6)
)
weight_update_meta = WeightUpdateMeta.from_disk()


def prepare_model(config):
    from areal_torch.models.tiny import make_tiny_model

    if not (Path(config.model.path) / "model.safetensors").exists():
        make_tiny_model(config.model.path, seed=config.seed)


# The loop below stays word for word, with what a linter has against it.
# ruff: noqa: B007, F841, RUF003
# fmt: off
def main(args):
    config, _ = load_expr_config(args, GRPOConfig)

    # 直接创建组件，无需复杂的worker管理
    rollout = RemoteSGLangEngine(config.rollout)
    actor = FSDPPPOActor(config=config.actor)
    ref = FSDPPPOActor(config=config.ref) if config.ref else None

    # 简单的训练循环
    for global_step in range(max_steps):
        # 1. 数据收集
        batch = rollout.rollout_batch(data, workflow=workflow)

        # 2. 计算优势函数
        actor.compute_advantages(batch)

        # 3. PPO更新
        stats = actor.ppo_update(batch)

        # 4. 权重同步
        actor.upload_weights(weight_update_meta)
