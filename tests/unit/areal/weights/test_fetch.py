"""Fetching a model before an engine starts: what is waited for, and what is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal.errors import InvalidInput
from areal.weights import fetch
from areal.weights.fetch import run
from areal.weights.publisher import TransportError

LOCATION = "http://weight-sync:8500/versions/v00000000-inc0"


def answers(monkeypatch: pytest.MonkeyPatch, *results: int | Exception) -> list[float]:
    """Has each try end so; returns the pauses between them."""
    left, pauses = list(results), []

    def fetched(*_: object) -> int:
        result = left.pop(0)
        if isinstance(result, Exception):
            raise result
        return result

    monkeypatch.setattr(fetch, "fetch_model", fetched)
    monkeypatch.setattr(fetch.time, "sleep", pauses.append)
    return pauses


def test_fetch_when_the_store_is_not_there_yet_then_tried_again_until_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    away = TransportError("Connection refused")
    pauses = answers(monkeypatch, away, away, 4)
    run(LOCATION, tmp_path)
    assert pauses == [1.0, 1.0]


def test_fetch_when_what_came_is_wrong_then_ends_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pauses = answers(monkeypatch, InvalidInput("digest 00…, expected 11…"))
    with pytest.raises(SystemExit, match="digest 00…, expected 11…"):
        run(LOCATION, tmp_path)
    assert pauses == []


def test_fetch_when_the_store_never_comes_then_ends_and_says_how_long_it_waited(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    answers(monkeypatch, TransportError("Connection refused"))
    with pytest.raises(SystemExit, match=f"waited 0 s for {LOCATION}: Connection refused"):
        run(LOCATION, tmp_path, wait=0.0)
