"""How long a fetch is tried again; the fetches are in integration/test_bring_model.py."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from areal.errors import ArealError, InvalidInput, Unavailable, WaitTimeout
from areal_trainer import model_sources
from areal_trainer.model_sources import Unreachable, until_deadline


def attempts(*ends: ArealError | None) -> Callable[[], None]:
    """Work whose tries end so, one after the other."""
    left = iter(ends)

    def work() -> None:
        if error := next(left):
            raise error

    return work


def test_fetch_when_the_hub_was_never_reached_then_it_ends_long_before_its_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_sources, "_UNREACHABLE_S", 0.5)
    work, said = attempts(Unreachable("no such host"), None), list[str]()
    with pytest.raises(InvalidInput, match="no such host"):
        until_deadline(work, tmp_path, time.monotonic() + 3600.0, said.append)
    assert not said, "it does not announce a try that does not come"


def test_fetch_when_the_network_is_lost_during_a_download_then_it_is_continued_until_its_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_sources, "_UNREACHABLE_S", 1.5)
    lost, away = Unavailable("connection lost"), Unreachable("no such host")
    said: list[str] = []
    deadline = time.monotonic() + 3600.0
    until_deadline(attempts(lost, away, None), tmp_path, deadline, said.append)
    assert said == ["connection lost; trying again in 1 s", "no such host; trying again in 2 s"]


def test_copy_when_it_pauses_before_it_is_whole_then_the_wait_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_sources, "_QUIET_S", 0.0)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(WaitTimeout, match="a model in"):
        model_sources.wait_for_copy(
            tmp_path, how="copy one", deadline=time.monotonic(), say=lambda _: None
        )
