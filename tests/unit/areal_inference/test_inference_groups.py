"""What a server keeps of a broadcast that failed: nothing, and at once."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from areal.errors import InvalidInput
from areal_inference.api import RequestError
from areal_inference.http_api.weight_groups import refusing


class Connections:
    """What closes when no one holds it anymore."""


async def test_refusal_when_work_fails_then_nothing_holds_what_it_used() -> None:
    """The other ends of its connections wait until they close."""
    held: list[weakref.ref[Connections]] = []

    def work() -> None:
        connections = Connections()
        held.append(weakref.ref(connections))
        raise InvalidInput("a member is gone")

    gc.collect()
    gc.disable()
    try:
        with pytest.raises(RequestError, match="a member is gone"):
            await refusing(work)
        async with asyncio.timeout(60):
            while held[0]() is not None:  # noqa: ASYNC110 - the thread may just be ending
                await asyncio.sleep(0.01)
    finally:
        gc.enable()
