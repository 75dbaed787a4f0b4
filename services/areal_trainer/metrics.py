"""Prometheus metrics of the trainer (rank 0)."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from areal.training.status import TrainerStatus

# Row key -> (metric, help). Gauges of the last finished step: the rows are the full record.
_GAUGES = {
    "reward/mean": ("areal_trainer_reward_mean", "Mean reward of the last step's batch."),
    "staleness/mean": ("areal_trainer_staleness_mean_versions", "Mean staleness of the batch."),
    "staleness/max": ("areal_trainer_staleness_max_versions", "Largest staleness in the batch."),
    "time/step": ("areal_trainer_step_seconds", "Wall time of the last step."),
    "time/wait": (
        "areal_trainer_wait_seconds",
        "Time of the last step spent waiting for its batch.",
    ),
    "time/train": ("areal_trainer_train_seconds", "Time of the last step spent computing."),
    "time/publish": (
        "areal_trainer_publish_seconds",
        "Time of the last step spent publishing weights.",
    ),
    "time/confirm": (
        "areal_trainer_confirm_seconds",
        "Time of the last step spent waiting until a server had confirmed the previous version.",
    ),
    "train/loss": ("areal_trainer_loss_value", "Loss of the last step."),
    "train/tokens_per_second": (
        "areal_trainer_tokens_per_second",
        "Tokens of the last batch over the seconds of its update.",
    ),
    "train/mfu": ("areal_trainer_mfu_ratio", "Model operations of the update over the GPUs' peak."),
    "train/peak_gib": (
        "areal_trainer_peak_memory_gib",
        "Peak memory of a rank, in GiB.",
    ),
    "time/forward": ("areal_trainer_forward_seconds", "Time of the last step's forward passes."),
    "time/backward": ("areal_trainer_backward_seconds", "Time of the last step's backward passes."),
    "time/optimizer": (
        "areal_trainer_optimizer_seconds",
        "Time of the last step's clipping and AdamW.",
    ),
    "train/grad_norm": ("areal_trainer_grad_norm_value", "Gradient norm before clipping."),
}


class TrainerCollector(Collector):
    """Reads the status when scraped, so training never touches a metric object."""

    def __init__(self, status: TrainerStatus, registry: CollectorRegistry) -> None:
        self._status = status
        registry.register(self)

    def collect(self) -> Iterable[GaugeMetricFamily]:
        snapshot = self._status.snapshot(after_step=self._status.snapshot(1 << 62).step - 1)
        yield GaugeMetricFamily(
            "areal_trainer_finished_steps", "Finished train steps.", value=snapshot.step
        )
        yield GaugeMetricFamily(
            "areal_trainer_unfinished_seconds",
            "Time since the last finished step, or since the start.",
            value=snapshot.unfinished_s,
        )
        row = snapshot.rows[-1] if snapshot.rows else {}
        for key, (name, text) in _GAUGES.items():
            if key in row:
                yield GaugeMetricFamily(name, text, value=float(row[key]))
