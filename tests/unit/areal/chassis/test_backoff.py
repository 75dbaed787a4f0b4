"""How clients come back after an outage."""

from __future__ import annotations

from areal.chassis.backoff import Backoff


def test_backoff_when_it_fails_again_then_longer_with_jitter_up_to_the_ceiling() -> None:
    many = [Backoff(0.1, 3.0) for _ in range(50)]
    assert all(backoff.fresh for backoff in many)
    for ceiling in (0.1, 0.2, 0.4, 0.8, 1.6, 3.0, 3.0):
        delays = [backoff.next() for backoff in many]
        assert all(ceiling / 2 <= delay <= ceiling for delay in delays)
        assert len(set(delays)) > 40, "not all at once"
    assert not many[0].fresh
    many[0].reset()
    assert many[0].fresh
    assert many[0].next() <= 0.1
