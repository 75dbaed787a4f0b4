"""Prometheus metrics: SGLang's names where it has them, `areal_inference_` for the rest."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from areal.chassis.waits import Waits, WaitsCollector
from areal_inference.decode.request import Request

if TYPE_CHECKING:
    from areal_inference.decode.scheduler import Scheduler

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class Metrics:
    """Latency histograms kept here; everything else is read from the scheduler when scraped."""

    def __init__(self, model_name: str):
        self._model_name = model_name
        self.waits = Waits()
        self._registry = CollectorRegistry()
        self._first_token = self._histogram(
            "sglang:time_to_first_token_seconds", "Time from arrival to the first output token."
        )
        self._latency = self._histogram(
            "sglang:e2e_request_latency_seconds", "Time from arrival to the end of the request."
        )

    def observe(self, request: Request) -> None:
        """Counts a finished request's latencies."""
        if request.first_token_at:
            self._first_token.observe(request.first_token_at - request.received_at)
        if request.finished_at:
            self._latency.observe(request.finished_at - request.received_at)

    def render(self, scheduler: Scheduler, max_total_tokens: int) -> bytes:
        """Returns the metrics in Prometheus's text format."""
        snapshot = CollectorRegistry()
        snapshot.register(_Snapshot(scheduler, max_total_tokens, self._model_name))
        WaitsCollector("inference", self.waits, snapshot)
        return generate_latest(snapshot) + generate_latest(self._registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        histogram = Histogram(name, text, ["model_name"], buckets=_SECONDS, registry=self._registry)
        return histogram.labels(self._model_name)


class _Snapshot:
    """Collects the scheduler's counters and queue lengths at scrape time."""

    def __init__(self, scheduler: Scheduler, max_total_tokens: int, model_name: str):
        self._scheduler = scheduler
        self._max_total_tokens = max_total_tokens
        self._labels = [model_name]

    def collect(self) -> Iterator[Metric]:
        scheduler, stats = self._scheduler, self._scheduler.stats
        running = list(scheduler.running)
        used = sum(r.length for r in running)
        for name, text, value in (
            ("sglang:num_running_reqs", "Requests being decoded.", len(running)),
            (
                "sglang:num_queue_reqs",
                "Requests waiting for room in the KV cache or for a weight update.",
                len(scheduler.waiting) + len(scheduler.held),
            ),
            ("sglang:num_used_tokens", "Tokens of running requests in the KV cache.", used),
            (
                "sglang:token_usage",
                "Fraction of the KV cache that is in use.",
                used / self._max_total_tokens,
            ),
            ("sglang:gen_throughput", "Generated tokens per second.", scheduler.throughput),
            (
                "areal_inference_paused",
                "1 while generation is paused.",
                int(scheduler.pause_mode is not None),
            ),
        ):
            gauge = GaugeMetricFamily(name, text, labels=["model_name"])
            gauge.add_metric(self._labels, value)
            yield gauge
        for name, text, value in (
            ("sglang:prompt_tokens", "Prompt tokens received.", stats.prompt_tokens),
            (
                "sglang:cached_tokens",
                "Prompt tokens taken from another request's KV cache instead of being computed.",
                stats.cached_tokens,
            ),
            ("sglang:generation_tokens", "Tokens generated.", stats.generation_tokens),
            ("sglang:num_requests", "Requests received.", stats.requests),
            ("sglang:num_aborted_requests", "Requests aborted.", stats.aborted),
            (
                "sglang:num_retracted_reqs",
                "Requests queued again without their KV cache.",
                stats.retracted,
            ),
            (
                "areal_inference_busy_seconds",
                "Time during which at least one request was being decoded.",
                stats.busy_seconds,
            ),
            ("areal_inference_steps", "Decode steps.", stats.steps),
            (
                "areal_inference_pause_seconds",
                "Time during which generation was paused.",
                scheduler.pause_seconds,
            ),
            ("areal_inference_weight_updates", "Weight updates loaded.", stats.weight_updates),
            (
                "areal_inference_weight_update_seconds",
                "Time spent reading and swapping weights (generation continues while reading).",
                stats.weight_update_seconds,
            ),
        ):
            counter = CounterMetricFamily(name, text, labels=["model_name"])
            counter.add_metric(self._labels, value)
            yield counter
