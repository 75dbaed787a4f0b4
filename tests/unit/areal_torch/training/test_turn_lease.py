"""The trainer's turn is renewed until it ends, through outages, and not a moment longer."""

from __future__ import annotations

import threading

import pytest

from areal.chassis.waits import Waits
from areal.errors import StaleIncarnation, Unavailable
from areal_torch.training import turn_lease
from areal_torch.training.bridge import AsyncBridge
from areal_torch.training.turn_lease import TurnLease


class WeightSync:
    """Notes what is asked of it."""

    address = "127.0.0.1:7300"

    def __init__(self) -> None:
        self.held: list[tuple[int, float]] = []
        self.error: Exception | None = None
        self.asked = threading.Semaphore(0)

    async def hold_servers(self, incarnation: int, *, lease_s: float) -> list[str]:
        self.held.append((incarnation, lease_s))
        self.asked.release()
        if self.error is not None:
            raise self.error
        return ["a"] if len(self.held) == 1 else []

    def wait(self, calls: int) -> None:
        for _ in range(calls):
            assert self.asked.acquire(timeout=60), "no call within 60 s"


@pytest.fixture
def bridge(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(turn_lease, "RENEW_S", 0.01)
    bridge = AsyncBridge(Waits())
    yield bridge
    bridge.close()


def lease_of(bridge: AsyncBridge) -> tuple[TurnLease, WeightSync]:
    service = WeightSync()
    return TurnLease(bridge, service, lambda: 7), service  # type: ignore[arg-type]


def test_lease_when_held_then_renewed_even_after_an_outage_until_it_ends(bridge: AsyncBridge):
    lease, service = lease_of(bridge)
    assert lease.sleep() == ["a"]
    assert lease.sleep() == []
    service.error = Unavailable("weight-sync: standing by")
    service.wait(5)
    service.error = None
    service.wait(5)
    lease.wake()
    number = len(service.held)
    assert set(service.held[:-1]) == {(7, turn_lease.LEASE_S)}
    assert service.held[-1] == (7, 0.0)
    lease.wake()  # twice is once
    assert len(service.held) == number + 1, "no renewal came after the end"


def test_lease_when_a_newer_trainer_has_the_gpus_then_no_longer_renewed(bridge: AsyncBridge):
    lease, service = lease_of(bridge)
    lease.sleep()
    service.error = StaleIncarnation("incarnation 7: expected 8 or newer")
    service.wait(2)
    bridge.call(_ended(lease), "the end of renewals", 60.0)
    with pytest.raises(StaleIncarnation):
        lease.sleep()


async def _ended(lease: TurnLease) -> None:
    assert lease._renewing is not None
    await lease._renewing


def test_lease_times_when_a_renewal_is_late_then_two_more_fit_before_it_ends():
    assert 3 * turn_lease.RENEW_S <= turn_lease.LEASE_S
