"""What a worker keeps of sessions is bounded, however many there are and however small."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from areal.v1 import buffer_service_pb2 as pb
from areal_rollout.session_cache import CachedCalls, SessionCache

LIMIT = 8 << 10


def calls(count: int, tokens: int = 1) -> CachedCalls:
    found = CachedCalls()
    for number in range(count):
        prompt = pb.SessionPrompt(call_id=str(number), token_ids=[7] * tokens)
        found.add([pb.SessionCall(number=number, prompt=prompt)])
    return found


def kept(cache: SessionCache, keys: int) -> int:
    return sum(cache.find((str(key), 0)).known is not None for key in range(keys))


def test_sessions_when_they_have_hardly_any_calls_then_their_number_is_bounded() -> None:
    cache = SessionCache(LIMIT)
    for key in range(1000):
        cache.keep((str(key), 0), calls(1))
    assert 1 <= kept(cache, 1000) <= 8
    assert cache.find(("999", 0)).known is not None


def test_sessions_when_they_have_no_calls_then_nothing_is_kept() -> None:
    """Such as those that have ended and are asked for their state."""
    cache = SessionCache(LIMIT)
    for key in range(1000):
        cache.keep((str(key), 0), CachedCalls())
    assert len(cache) == 0
    cache.keep(("a", 0), calls(2))
    cache.keep(("a", 0), CachedCalls())
    assert len(cache) == 0


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3), st.booleans()), max_size=40))
def test_cache_when_any_sessions_come_and_go_then_its_sum_is_that_of_its_entries(
    turns: list[tuple[int, int, bool]],
) -> None:
    cache = SessionCache(LIMIT)
    for key, count, gone in turns:
        if gone:
            cache.drop((str(key), 0))
        else:
            cache.keep((str(key), 0), calls(count, tokens=500))
    for key in range(10):
        cache.drop((str(key), 0))
    assert len(cache) == 0
    cache.keep(("last", 0), calls(1))
    assert cache.find(("last", 0)).known is not None
