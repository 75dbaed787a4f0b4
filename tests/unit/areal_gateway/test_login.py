"""The cookie that stands for the token."""

from __future__ import annotations

from areal.security import Security
from areal_gateway.login import LIFETIME_S, Sessions

TOKEN = "correct-horse-battery-staple"


def test_session_when_issued_then_valid_until_it_expires() -> None:
    now = 1_000_000.0
    sessions = Sessions(Security(token=TOKEN), "arithmetic/t0", lambda: now)
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
    expires, _, mac = cookie.partition(".")
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
        f"{int(expires) + 1}.{mac}",
        f"{expires}.{mac[:-1]}",
        f"+{expires}.{mac}",
        f"\u00b2.{mac}",
        f"{'9' * 5000}.{mac}",
        f"{expires}.\udcff",
    ):
        assert not sessions.valid(forged)
