"""A process without time of its own gives servers more, but not without end."""

from __future__ import annotations

import asyncio

import pytest
from tests.unit.areal_weight_sync.weight_sync_fakes import FakeEngine

from areal_weight_sync.engine import probing
from areal_weight_sync.engine.base import EngineError, Fault
from areal_weight_sync.engine.probing import ask_version


@pytest.mark.parametrize(("late_s", "asked"), [(1000.0, 2), (-1000.0, 5)], ids=["in time", "late"])
async def test_probe_when_every_deadline_is_noticed_late_then_it_ends_after_some_more_questions(
    monkeypatch: pytest.MonkeyPatch, late_s: float, asked: int
) -> None:
    monkeypatch.setattr(probing, "_LATE_S", late_s)
    engine = FakeEngine()
    engine.late = 1000  # it answers none
    probe = ask_version(engine, 0.02, lambda: False, "a")
    with pytest.raises(EngineError, match="twice in a row") as caught:
        await asyncio.wait_for(probe, 20)
    assert caught.value.fault is Fault.TIMEOUT
    assert engine.calls == ["weight_version"] * asked
