r"""GRPO on GSM8K: an instruct model learns to reason about grade-school mathematics.

    areal run examples/gsm8k_grpo.py stack.gpus_per_node=2 allocation_mode=auto   # docs/gpu.md
    areal run examples/gsm8k_grpo.py model.path=/models/SmolLM2-135M-Instruct total_train_steps=3 \
        allocation_mode=sglang:d1+fsdp:d1 train_dataset.batch_size=4 gconfig.n_samples=4 \
        gconfig.max_new_tokens=96 model.context_length=512 heldout_rows=0       # on a CPU

The rows come from openai/gsm8k on the Hub. `train_dataset.path` may also be a folder with the files
train.jsonl and test.jsonl of https://github.com/openai/grade-school-math. The reward is 1 if the
library math-verify finds the answer equal to the right one, else 0.
"""

from dataclasses import dataclass, replace

from areal import (
    FSDPPPOActor,
    GRPOConfig,
    RemoteSGLangEngine,
    RLVRWorkflow,
    StatefulLoader,
    WeightUpdateMeta,
    load_expr_config,
)
from areal.datasets.gsm8k import gsm8k_row
from areal.datasets.heldout import train_and_heldout


@dataclass
class Config(GRPOConfig):
    """Keys of the experiment file: those of GRPOConfig, and the recipe's own."""

    heldout_rows: int = 200
    """Number of rows to evaluate on, before and after training; 0: no evaluation. They are rows of
    the split `test`, or held out of the file if the rows are a single file."""


def main(argv):
    config, _ = load_expr_config(argv, Config)
    parts = train_and_heldout(config.train_dataset.path, config.heldout_rows)
    train, heldout = ([gsm8k_row(row) for row in rows] for rows in parts)

    rollout = RemoteSGLangEngine(config.rollout)
    actor = FSDPPPOActor(config.actor)
    workflow = RLVRWorkflow("math", config.gconfig)
    one_answer = RLVRWorkflow("math", replace(config.gconfig, n_samples=1, greedy=True))
    dataloader = StatefulLoader(train, seed=config.seed)

    if heldout:
        rollout.evaluate(heldout, one_answer, name="heldout_before")
    for _ in range(actor.get_version(), config.total_train_steps):
        batch = rollout.prepare_batch(dataloader, workflow=workflow)
        actor.compute_advantages(batch)
        actor.ppo_update(batch)
        actor.upload_weights(WeightUpdateMeta.from_disk())
    if heldout:
        rollout.evaluate(heldout, one_answer, name="heldout_after")
