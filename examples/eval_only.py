r"""Evaluation only: a model answers dataset rows, and a reward function scores the answers.

    areal eval model.path=Qwen/Qwen2.5-1.5B-Instruct                         # GSM8K's test split
    areal eval model.path=runs/gsm8k-sft/trial0/model rows=200 gconfig.n_samples=4
    areal run examples/eval_only.py model.path=…                             # the same

The results are in the run folder: the mean reward and its standard error in trainer.json, and every
answer in evaluations/.
"""

from dataclasses import dataclass

from areal import GRPOConfig, RemoteSGLangEngine, RLVRWorkflow, load_expr_config
from areal.datasets.gsm8k import gsm8k_row
from areal.datasets.rows import load_rows


@dataclass
class Config(GRPOConfig):
    """Keys of the experiment file: those of GRPOConfig, and the recipe's own."""

    rows: int = 0
    """Maximum number of rows to evaluate; 0: all rows of the split."""
    split: str = "test"
    reward_name: str = "math"
    """A built-in reward: math, multiple_choice, regex."""


def main(argv):
    config, _ = load_expr_config(argv, Config)
    found = load_rows(config.train_dataset.path, config.split)
    rows = [row if "messages" in row else gsm8k_row(row) for row in found][: config.rows or None]
    rollout = RemoteSGLangEngine(config.rollout)
    rollout.evaluate(rows, RLVRWorkflow(config.reward_name, config.gconfig), name="reward")
