"""What an alert on an absent Redis goes by."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry

from areal.protocol.leases import LedgerStats
from areal_buffer.metrics import BufferMetrics
from areal_buffer.records import MemoryGauge


def test_redis_when_it_has_answered_then_the_time_is_kept() -> None:
    registry = CollectorRegistry()
    metrics = BufferMetrics(registry)
    stats = LedgerStats(held_bytes=7)
    memory = MemoryGauge(9)
    name = "areal_buffer_redis_answered_timestamp_seconds"
    before = time.time()
    metrics.sampled(stats, memory, queue_age_s=0.0)
    first = registry.get_sample_value(name)
    assert first is not None
    assert before <= first <= time.time()
    metrics.sampled(stats, memory, queue_age_s=0.0)
    second = registry.get_sample_value(name)
    assert second is not None
    assert second >= first
    held = registry.get_sample_value("areal_buffer_held_bytes")
    assert (held, registry.get_sample_value("areal_buffer_limit_bytes")) == (7, 9)
