"""What Redis' own words mean for a caller: later again, no room, or a fault."""

from __future__ import annotations

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import OutOfMemoryError, ReadOnlyError, ResponseError

from areal.errors import ArealError, CapacityExceeded, LeaseLost, Unavailable
from areal_buffer.scripts import translate

FOR_NOW = [
    "NOREPLICAS Not enough good replicas to write.",
    "MISCONF Redis is configured to save RDB snapshots, but it's unable to persist to disk.",
    "BUSY Redis is busy running a script.",
    "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.",
    "LOADING Redis is loading the dataset in memory",
]


@pytest.mark.parametrize("words", FOR_NOW)
def test_error_when_redis_refuses_for_now_then_tried_again(words: str) -> None:
    assert type(translate(ResponseError(words))) is Unavailable
    within = f"Command # 2 (EVALSHA …) of pipeline caused error: ('{words}',)"
    assert type(translate(ResponseError(within))) is Unavailable


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RedisConnectionError("Connection refused"), Unavailable),
        (ReadOnlyError("READONLY You can't write against a read only replica."), Unavailable),
        (OutOfMemoryError("command not allowed when used memory > 'maxmemory'."), CapacityExceeded),
        (ResponseError("OOM command not allowed"), CapacityExceeded),
        (ResponseError("AREAL LeaseLost task a: lease 1 no longer holds script: 12ab"), LeaseLost),
        (ResponseError("WRONGTYPE Operation against a key"), ArealError),
        (ResponseError("ERR it says BUSY in the middle"), ArealError),
    ],
)
def test_error_when_translated_then_its_class_says_what_to_do(
    error: ResponseError, kind: type[ArealError]
) -> None:
    assert type(translate(error)) is kind


def test_error_when_a_pipeline_quotes_its_command_then_only_what_redis_said_is_told() -> None:
    said = "command not allowed when used memory > 'maxmemory'."
    quoted = f"Command # 1 (MSET k \x00\ufffd=...) of pipeline caused error: {(said,)}"
    told = f"Redis is out of memory: {said}; try again in 5 s"
    assert str(translate(OutOfMemoryError(quoted))) == told
    assert str(translate(OutOfMemoryError(said))) == told


def test_error_when_a_script_refused_then_its_line_is_all_that_is_told() -> None:
    error = ResponseError("AREAL LeaseLost task a: lease 1 no longer holds script: 12ab, on line 3")
    assert str(translate(error)) == "task a: lease 1 no longer holds"
