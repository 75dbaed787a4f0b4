r"""Evaluation only: a model answers rows and a reward function scores the answers.

    areal eval model.path=Qwen/Qwen2.5-1.5B-Instruct                         # GSM8K's test split
    areal eval model.path=runs/gsm8k/trial0/model rows=200 gconfig.n_samples=4
    areal run examples/eval_only.py model.path=…                             # the same

The mean reward, its standard error, and every answer are in the run folder: trainer.json and
evaluations/.
"""

from dataclasses import dataclass

from areal import GRPOConfig, RemoteSGLangEngine, RLVRWorkflow, load_expr_config
from areal.datasets.gsm8k import gsm8k_row
from areal.datasets.rows import load_rows


@dataclass
class Config(GRPOConfig):
    """The experiment file's schema: GRPOConfig and what this recipe adds."""

    rows: int = 0
    """Maximum number of rows of the split; 0: all."""
    split: str = "test"
    reward_name: str = "math"
    """A built-in reward: math, multiple_choice, regex."""


def main(argv):
    config, _ = load_expr_config(argv, Config)
    found = load_rows(config.train_dataset.path, config.split)
    rows = [row if "messages" in row else gsm8k_row(row) for row in found][: config.rows or None]
    rollout = RemoteSGLangEngine(config.rollout)
    rollout.evaluate(rows, RLVRWorkflow(config.reward_name, config.gconfig), name="reward")
