"""How long a process has been silent: only silence in a row counts."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from areal_launch.processes import liveness as pulse
from areal_launch.processes.liveness import wait_silent


async def test_silence_when_answers_come_in_between_then_it_begins_afresh_with_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, answers = [0.0], iter([*["no answer"] * 3, ""] * 20 + ["no answer"] * 9)

    async def sleep(seconds: float) -> None:
        clock[0] += seconds

    async def probe() -> str:
        return next(answers)

    monkeypatch.setattr(pulse, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(pulse, "asyncio", SimpleNamespace(sleep=sleep))
    said = await wait_silent(probe, os.getpid(), 8.0)  # a look every two seconds
    assert said == "gave no sign of life for 8 s: no answer"
    assert clock == [20 * 8.0 + 8.0]


async def test_silence_when_it_is_this_process_that_stood_still_then_it_counts_for_little(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, looks = [0.0], [0]

    async def sleep(_: float) -> None:
        clock[0] += 3600.0

    async def probe() -> str:
        looks[0] += 1
        return "no answer"

    monkeypatch.setattr(pulse, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(pulse, "asyncio", SimpleNamespace(sleep=sleep))
    await wait_silent(probe, os.getpid(), 50.0)
    assert looks == [5]
