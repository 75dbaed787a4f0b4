"""Prometheus metrics of the trainer (rank 0)."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from areal.runs.status import TrainerStatus

# Row key -> (metric, help). Gauges of the last finished step: the rows are the full record.
_GAUGES = {
    "reward/mean": ("areal_trainer_reward_mean", "Mean reward of the batch of the last step."),
    "staleness/mean": (
        "areal_trainer_staleness_mean_versions",
        "Mean staleness of the groups of the last step.",
    ),
    "staleness/max": (
        "areal_trainer_staleness_max_versions",
        "Largest staleness of a group of the last step.",
    ),
    "time/step": ("areal_trainer_step_seconds", "Wall time of the last step."),
    "time/wait": (
        "areal_trainer_wait_seconds",
        "Time that the last step spent waiting for its batch.",
    ),
    "time/train": (
        "areal_trainer_train_seconds",
        "Time that the last step spent updating the policy.",
    ),
    "time/publish": (
        "areal_trainer_publish_seconds",
        "Time that the last step spent waiting for the export of its weights.",
    ),
    "time/confirm": (
        "areal_trainer_confirm_seconds",
        "Time that the last step spent waiting for a server to confirm the previous version.",
    ),
    "train/loss": ("areal_trainer_loss_value", "Loss of the last step."),
    "train/tokens_per_second": (
        "areal_trainer_tokens_per_second",
        "Tokens that the last update computed per second, prompts included.",
    ),
    "train/mfu": ("areal_trainer_mfu_ratio", "Model FLOPs utilization of the last update, 0 to 1."),
    "train/peak_gib": (
        "areal_trainer_peak_memory_gib",
        "Peak memory of the rank that uses the most, in GiB.",
    ),
    "time/forward": (
        "areal_trainer_forward_seconds",
        "Time of the forward passes of the last step.",
    ),
    "time/backward": (
        "areal_trainer_backward_seconds",
        "Time of the backward passes of the last step.",
    ),
    "time/optimizer": (
        "areal_trainer_optimizer_seconds",
        "Time of gradient clipping and the optimizer in the last step.",
    ),
    "train/grad_norm": (
        "areal_trainer_grad_norm_value",
        "Gradient norm of the last step, before clipping.",
    ),
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
            "Time since the last step finished, or since the trainer started.",
            value=snapshot.unfinished_s,
        )
        row = snapshot.rows[-1] if snapshot.rows else {}
        for key, (name, text) in _GAUGES.items():
            if key in row:
                yield GaugeMetricFamily(name, text, value=float(row[key]))
