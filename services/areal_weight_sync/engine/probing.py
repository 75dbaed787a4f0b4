"""Asks a server which version it serves, without mistaking a busy server for a dead one.

    ask ──> answer within the deadline ──────────────────────────────┐
     │ silence while this process itself had no time ──> ask again ──┤
     │ silence: a client's request failed there too ──> EngineError  ├──> the version
     └ silence alone ──> ask again; either answer counts ────────────┘
                            └ silence again ──> EngineError

The first question stays open while the second is asked. So a server that takes longer than the
deadline for every answer, as one on a starved processor does, is alive as long as one of them comes
before the second deadline; one that answers nothing is found out then, and after a failed request
at the first.

| state        | consumes   | waits for         | unblocked by          |
|--------------|------------|-------------------|-----------------------|
| asked once   | a request  | the answer        | it, deadline_s        |
| asked twice  | 2 requests | one of the two    | it, deadline_s        |
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import cast

from areal.chassis.logging import get_logger
from areal_weight_sync.engine.base import Engine, EngineError, Fault, Fingerprint

# A deadline noticed so late says that this process had no time, not that a server is silent: a
# starved weight-sync must not quarantine all servers at once.
_LATE_S = 0.5
_OWN_DELAYS = 3


async def ask_version(
    engine: Engine, deadline_s: float, suspected: Callable[[], bool], server: str
) -> str:
    """Returns the server's weight_version.

    Args:
        engine: The server.
        deadline_s: For each of the two questions.
        suspected: Whether a client has said that a request failed there.
        server: Its id, for the log.

    Raises:
        EngineError: TIMEOUT if it was silent; else the error in its first answer.
    """
    now = asyncio.get_running_loop().time
    log = get_logger(__name__)
    asked: set[asyncio.Task[str]] = set()
    silences = delays = 0
    silent = f"/model_info: no answer within {deadline_s:.1f} s"
    try:
        while silences < 2:
            # Its own deadline is later than ours, which ends it.
            asked.add(asyncio.create_task(engine.weight_version(4 * deadline_s), name="probe"))
            deadline = now() + deadline_s
            answered, _ = await asyncio.wait(
                asked, timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED
            )
            if answered:
                return answered.pop().result()
            if (late := now() - deadline) > _LATE_S and delays < _OWN_DELAYS:
                delays += 1
                log.info("probe_late", server=server, seconds=round(late, 1))
                continue
            silences += 1
            if suspected():
                raise EngineError(Fault.TIMEOUT, f"{silent}, and a request failed")
            log.info("probe_missed", server=server)
        raise EngineError(Fault.TIMEOUT, f"{silent}, twice in a row")
    finally:
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)


async def inspect(
    engine: Engine, expected: str, version: Awaitable[str], timeout: float
) -> Fingerprint | None:
    """Returns version and checksum, asked at once: every round trip here lengthens a pause.

    Args:
        engine: A server that has just loaded.
        expected: The version that it must report.
        version: The version that it reports; see `ask_version`.
        timeout: Limit for the checksum, in seconds.

    Raises:
        EngineError: It reports another version, or one of the two calls failed.
    """
    reported, fingerprint = await asyncio.gather(
        version, engine.fingerprint(timeout), return_exceptions=True
    )
    for result in (reported, fingerprint):
        if isinstance(result, BaseException):
            raise result
    if reported != expected:
        raise EngineError(
            Fault.WRONG_VERSION, f"reports weight_version {reported!r}, expected {expected!r}"
        )
    return cast("Fingerprint | None", fingerprint)
