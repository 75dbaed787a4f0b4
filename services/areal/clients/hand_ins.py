"""Finished groups on their way to the ledger: what is ready goes together.

    offer() ──> waiting ──┬─ call 1 ─ CompleteTasks ──> each offer's own result
                          └─ call 2 ─ encodes the next ones meanwhile

| state   | consumes        | waits for          | unblocked by                            |
|---------|-----------------|--------------------|-----------------------------------------|
| waiting | nothing         | one of two calls   | its answer: at once if fewer are active |
| sent    | the ledger      | CompleteTasks      | its answer, or its deadline and retries |

Nothing waits for company: a lone group leaves at once; those that become ready while both calls
are under way share the next one, and with it a round trip and an fsync.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from areal import errors
from areal.v1 import buffer_service_pb2 as pb

# While the ledger checks and stores what one call brought, the next is encoded and sent.
_CALLS = 2
# A call takes no more once it has so much, so that there is something to overlap.
CALL_BYTES = 1024 * 1024

Send = Callable[[pb.CompleteTasksRequest], Awaitable[Sequence[pb.CompletionResult]]]


class _Offer(NamedTuple):
    worker_id: str
    task_id: str
    token: int
    encode: Callable[[], bytes]
    recorded: asyncio.Future[bool]


class HandIns:
    """Shares calls between those who hand in at the same time."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._waiting: deque[_Offer] = deque()
        self._calls: set[asyncio.Task[None]] = set()

    async def offer(
        self, worker_id: str, task_id: str, token: int, encode: Callable[[], bytes]
    ) -> bool:
        """Hands in the group that `encode` gives; True: recorded now, False: it had been before.

        Raises:
            ArealError: Of `encode`, of the ledger for this group, or of the call.
        """
        recorded: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        offer = _Offer(worker_id, task_id, token, encode, recorded)
        self._waiting.append(offer)
        if len(self._calls) < _CALLS:
            call = asyncio.create_task(self._call())
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)
        return await recorded

    async def close(self) -> None:
        """Gives up what is under way; those who wait for it are cancelled."""
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)
        for offer in self._waiting:
            offer.recorded.cancel()

    async def _call(self) -> None:
        while self._waiting:
            offers, request = self._next()
            if not offers:
                continue
            try:
                results = await self._send(request)
                for offer, result in zip(offers, results, strict=True):
                    _settle(offer, _outcome(result))
            except Exception as error:  # each of them is told
                for offer in offers:
                    _settle(offer, error)
            finally:
                for offer in offers:
                    offer.recorded.cancel()  # the call was cancelled; else this does nothing

    def _next(self) -> tuple[list[_Offer], pb.CompleteTasksRequest]:
        """The offers of the next call: of one worker, up to a size; nobody waits for the others."""
        offers: list[_Offer] = []
        request = pb.CompleteTasksRequest()
        size = 0
        while self._waiting and size < CALL_BYTES:
            if offers and self._waiting[0].worker_id != offers[0].worker_id:
                break
            offer = self._waiting.popleft()
            if offer.recorded.done():  # who offered it was cancelled
                continue
            try:
                group = offer.encode()
            except Exception as error:  # of this group alone
                _settle(offer, error)
                continue
            offers.append(offer)
            # In place: a message made apart would be serialized and parsed to be copied here.
            completion = request.completions.add(group=group)
            completion.lease.task_id, completion.lease.token = offer.task_id, offer.token
            size += len(group)
        if offers:
            request.worker_id = offers[0].worker_id
        return offers, request


def _outcome(result: pb.CompletionResult) -> bool | Exception:
    if not result.error:
        return result.recorded
    kind = getattr(errors, result.error, None)
    if not (isinstance(kind, type) and issubclass(kind, errors.ArealError)):
        kind = errors.ArealError
    return kind(result.message)


def _settle(offer: _Offer, outcome: bool | Exception) -> None:
    if offer.recorded.done():
        return
    if isinstance(outcome, Exception):
        offer.recorded.set_exception(outcome)
    else:
        offer.recorded.set_result(outcome)
