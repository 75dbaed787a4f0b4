"""How much the ledger may hold, beside what others have in the same Redis."""

from __future__ import annotations

import pytest

from areal_buffer.records import MemoryGauge

GIB = 2**30


@pytest.mark.parametrize(
    ("held", "used", "redis_limit", "limit"),
    [
        (0, 50 * GIB, 0, 2 * GIB),  # Redis has no limit: others' data is none of ours
        (GIB, 50 * GIB, 100 * GIB, 2 * GIB),
        (GIB, 79 * GIB, 100 * GIB, 2 * GIB),
        (GIB, 79.5 * GIB, 100 * GIB, 1.5 * GIB),  # half a GiB is left to everybody
        (GIB, 80 * GIB, 100 * GIB, GIB),
        (GIB, 80.5 * GIB, 100 * GIB, 0.5 * GIB),  # what we hold has to become less
        (GIB, 99 * GIB, 100 * GIB, 0),
        (0, GIB, 2 * GIB, 0.6 * GIB),
    ],
)
def test_limit_when_redis_has_one_then_four_fifths_of_it_are_shared_and_ours_stays(
    held: int, used: float, redis_limit: int, limit: float
) -> None:
    memory = MemoryGauge(2 * GIB)
    memory.sample(held, int(used), redis_limit)
    assert memory.limit_bytes == pytest.approx(limit, abs=1)
    assert (memory.ledger_bytes, memory.redis_bytes) == (held, int(used))


def test_limit_when_redis_has_room_again_then_it_is_what_was_asked_for() -> None:
    memory = MemoryGauge(2 * GIB)
    assert memory.limit_bytes == 2 * GIB
    memory.sample(0, 90 * GIB, 100 * GIB)
    assert memory.limit_bytes == 0
    memory.sample(0, 10 * GIB, 100 * GIB)
    assert memory.limit_bytes == 2 * GIB
