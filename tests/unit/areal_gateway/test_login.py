"""The cookie that stands for the token."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from areal.security import Security
from areal_gateway.login import LIFETIME_S, Sessions

TOKEN = "correct-horse-battery-staple"


def test_session_when_issued_then_valid_until_it_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1_000_000.0
    monkeypatch.setattr("itsdangerous.timed.time", SimpleNamespace(time=lambda: now))
    sessions = Sessions(Security(token=TOKEN), "arithmetic/t0")
    cookie = sessions.issue()
    assert TOKEN not in cookie
    assert sessions.valid(cookie)
    now += LIFETIME_S - 1
    assert sessions.valid(cookie)
    now += 2
    assert not sessions.valid(cookie)


def test_session_when_forged_or_of_another_token_or_run_then_refused() -> None:
    sessions = Sessions(Security(token=TOKEN), "arithmetic/t0")
    cookie = sessions.issue()
    what, issued, mac = cookie.split(".")
    later = issued[:-1] + ("A" if issued[-1] != "A" else "B")
    other_token = Sessions(Security(token=TOKEN + "!"), "arithmetic/t0")
    other_run = Sessions(Security(token=TOKEN), "arithmetic/t1")
    assert other_run.cookie != sessions.cookie
    dashes = [Sessions(Security(token=TOKEN), name) for name in ("a-b/c", "a/b-c")]
    assert dashes[0].cookie != dashes[1].cookie
    assert not dashes[1].valid(dashes[0].issue())
    assert not other_token.valid(cookie)
    assert not other_run.valid(cookie)
    for forged in (
        "",
        ".",
        mac,
        f"{what}.{later}.{mac}",
        f"{what}.{issued}.{mac[:-1]}",
        f"write.{issued}.{mac}",
        f"{what}.\u00b2.{mac}",
        f"{what}.{'9' * 5000}.{mac}",
        f"{what}.{issued}.\udcff",
        f"{what}.{mac}",
    ):
        assert not sessions.valid(forged)
