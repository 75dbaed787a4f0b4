r"""Evaluation only: a model answers dataset rows, and a reward function scores the answers.

    areal eval model.path=Qwen/Qwen2.5-1.5B-Instruct                         # GSM8K's test split
    areal eval model.path=runs/gsm8k-sft/trial0/model rows=200 gconfig.n_samples=4
    areal run examples/eval_only.py model.path=…                             # the same

Of a single file, all rows are evaluated, or, with `rows`, those that a training recipe with the
same number of `heldout_rows` does not train on. The results are in the run folder: the mean reward
and its standard error in trainer.json, and every answer in evaluations/.
"""

from dataclasses import dataclass
from pathlib import Path

from areal import GRPOConfig, RemoteSGLangEngine, RLVRWorkflow, load_expr_config
from areal.datasets.gsm8k import gsm8k_row
from areal.datasets.heldout import hold_out
from areal.datasets.rows import load_rows


@dataclass
class Config(GRPOConfig):
    """Keys of the experiment file: those of GRPOConfig, and the recipe's own."""

    rows: int = 0
    """Maximum number of rows to evaluate; 0: all rows of the split."""
    split: str = "test"
    """The split of a folder or dataset. A single file has no splits."""
    reward_name: str = "math"
    """A built-in reward (docs/rewards.md)."""


def main(argv):
    config, _ = load_expr_config(argv, Config)
    rows = [row if "messages" in row else gsm8k_row(row) for row in rows_of(config)]
    rollout = RemoteSGLangEngine(config.rollout)
    rollout.evaluate(rows, RLVRWorkflow(config.reward_name, config.gconfig), name="reward")


def rows_of(config: Config) -> list[dict]:
    """Returns the rows to evaluate."""
    path, count = config.train_dataset.path, config.rows
    if not Path(path).is_file():
        return load_rows(path, config.split)[: count or None]
    found = load_rows(path)
    return hold_out(found, count)[1] if 0 < count < len(found) else found
