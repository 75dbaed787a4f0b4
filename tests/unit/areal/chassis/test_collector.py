"""The garbage collector while much is imported."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from areal.chassis.collector import collector_paused


@pytest.fixture(autouse=True)
def enabled() -> Iterator[None]:
    frozen = gc.get_freeze_count()
    yield
    gc.enable()
    if not frozen:
        gc.unfreeze()


def test_collector_when_paused_then_off_inside_and_on_again_after_an_error() -> None:
    def block() -> None:
        with collector_paused():
            assert not gc.isenabled()
            raise ImportError

    with pytest.raises(ImportError):
        block()
    assert gc.isenabled()


def test_collector_when_it_was_off_then_it_stays_off() -> None:
    gc.disable()
    with collector_paused():
        pass
    assert not gc.isenabled()


def test_objects_when_made_while_paused_then_old_and_still_collected() -> None:
    gc.unfreeze()
    with collector_paused():
        cycle: list[object] = []
        cycle.append(cycle)
    assert any(each is cycle for each in gc.get_objects(generation=2))
    del cycle
    assert gc.get_freeze_count() == 0
    assert gc.collect() > 0


def test_objects_when_frozen_before_then_they_stay_frozen() -> None:
    gc.freeze()
    with collector_paused():
        pass
    assert gc.get_freeze_count() > 0
