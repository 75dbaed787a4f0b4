"""Names of the metrics of a step, as metrics.jsonl, trackers and views have them (docs/metrics.md).

Engines describe one update and know nothing about a run; their statistics get the run's names here.
Rows of earlier releases use the same names as those statistics, so this table renames them as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_TIMES = (
    *("step", "wait", "train", "publish", "confirm", "checkpoint", "update"),
    *("forward", "backward", "optimizer"),
)

NAMES: dict[str, str] = {
    "reward": "reward/mean",
    "reward_mean": "reward/mean",
    "reward_std": "reward/std",
    "groups_zero_std": "group/zero_std",
    "truncated": "rollout/truncated",
    "response_tokens": "rollout/length_mean",
    "response_tokens_max": "rollout/length_max",
    "staleness_mean": "staleness/mean",
    "staleness_max": "staleness/max",
    "n_sequences": "samples",
    "loss": "train/loss",
    "accuracy": "train/accuracy",
    "margin": "train/margin",
    "advantage_abs": "train/advantage_abs",
    "grad_norm": "train/grad_norm",
    "lr": "train/lr",
    "skipped_steps": "train/skipped_steps",
    "n_micro_batches": "train/micro_batches",
    "n_tokens": "train/tokens",
    "tokens": "train/loss_tokens",
    "n_loss_tokens": "train/loss_tokens",
    "tokens_per_second": "train/tokens_per_second",
    "mfu": "train/mfu",
    "peak_gib": "train/peak_gib",
    "ppo_ratio": "policy/ppo_ratio",
    "clip_ratio": "policy/clip_ratio",
    "dual_clip_ratio": "policy/dual_clip_ratio",
    "approx_kl": "policy/kl",
    "entropy": "policy/entropy",
    "behavior_weight": "policy/behavior_weight",
    "behavior_weight_max": "policy/behavior_weight_max",
    "behavior_weight_capped_ratio": "policy/behavior_weight_capped",
    "kl": "reference/kl",
    "seconds": "time/engine",
    "critic/seconds": "time/critic",
    **{f"{part}_seconds": f"time/{part}" for part in _TIMES},
}
"""Statistic of an engine, or key of an earlier release's row -> metric. All other keys are kept."""


def named(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a row, or the statistics of an update, under the names of metrics."""
    return {NAMES.get(key, key): value for key, value in row.items()}


def evaluation_names(name: str, mean: float, stderr: float) -> dict[str, float]:
    """Returns the metrics of one evaluation, as trackers have them."""
    return {f"eval/{name}/mean": mean, f"eval/{name}/stderr": stderr}
