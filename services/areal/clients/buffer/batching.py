"""Batches the calls that end leases: those that are ready at the same time share a message.

    offer() ──> waiting ──┬─ call 1 ─ CompleteTasks ──> each offer's own result
                          └─ call 2 ─ encodes the next ones meanwhile

| state   | consumes        | waits for          | unblocked by                            |
|---------|-----------------|--------------------|-----------------------------------------|
| waiting | nothing         | one of two calls   | its answer: at once if fewer are active |
| sent    | the ledger      | CompleteTasks      | its answer, or its deadline and retries |

Completions and returns each have their own `Batching`; for returns the call is ReturnTasks. A
single item is sent at once and waits for no others. Items that become ready while both calls are
under way share the next call, and with it a round trip and an fsync. If both calls are free and
there are more than a few items, each call takes half, so one is encoded while the ledger works on
the other. Items are sent in the order in which they were offered.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar, cast

from areal import errors
from areal.chassis import tracing

# While the ledger checks and stores what one call brought, the next is encoded and sent.
_CALLS = 2
# A call takes no more once it has so much, so that there is something to overlap.
CALL_BYTES = 1024 * 1024
# Fewer items than this are sent in one call: a second call costs more than their encoding.
_TOGETHER = 8


class Result(Protocol):
    """The ledger's answer to one item; if it was refused, it has the error's name."""

    error: str
    message: str


RequestT = TypeVar("RequestT")
ResultT = TypeVar("ResultT", bound=Result)


class _Offer(NamedTuple, Generic[RequestT, ResultT]):
    worker_id: str
    add: Callable[[RequestT], int]
    result: asyncio.Future[ResultT]


class Batching(Generic[RequestT, ResultT]):
    """Combines calls that end leases at the same time."""

    def __init__(
        self,
        new: Callable[[str], RequestT],
        send: Callable[[RequestT], Awaitable[Sequence[ResultT]]],
    ) -> None:
        """Sends nothing yet.

        Args:
            new: An empty request of a worker.
            send: Makes one call; returns one result for each item, in order.
        """
        self._new = new
        self._send = send
        self._waiting: deque[_Offer[RequestT, ResultT]] = deque()
        self._calls: set[asyncio.Task[None]] = set()
        self._sent = 0

    async def offer(self, worker_id: str, add: Callable[[RequestT], int]) -> ResultT:
        """Sends what `add` adds to a request; returns the ledger's result for it.

        Args:
            worker_id: The worker; a request holds items of one worker only.
            add: Encodes the item directly into the request (a separate message would have to be
                serialized and parsed again); returns its size in bytes, above 0. If it raises, it
                has added nothing.

        Raises:
            ArealError: `add` raised it, the ledger refused this item, or the call failed.
        """
        result: asyncio.Future[ResultT] = asyncio.get_running_loop().create_future()
        offer = _Offer(worker_id, add, result)
        self._waiting.append(offer)
        if len(self._calls) < _CALLS:
            call = asyncio.create_task(self._call())
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)  # also of one that is cancelled unstarted
        return await result

    async def close(self) -> None:
        """Cancels the calls under way, and the callers that wait for them."""
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)
        for offer in self._waiting:
            offer.result.cancel()

    async def _call(self) -> None:
        while self._waiting:
            offers, request = self._next()
            if not offers:
                continue
            self._sent += 1
            try:
                with tracing.apart():  # the call belongs to all offers, not to the first
                    results = await self._send(request)
                for offer, result in zip(offers, results, strict=True):
                    _settle(offer, _outcome(result))
            except Exception as error:  # every offer gets the error
                for offer in offers:
                    _settle(offer, error)
            finally:
                self._sent -= 1
                for offer in offers:
                    offer.result.cancel()  # the call was cancelled; else this does nothing
        # Now, not in a callback: an offer that comes in between would count on this call.
        self._calls.discard(cast("asyncio.Task[None]", asyncio.current_task()))

    def _next(self) -> tuple[list[_Offer[RequestT, ResultT]], RequestT]:
        """The offers of a free call: its share, of one worker, up to a size."""
        offers: list[_Offer[RequestT, ResultT]] = []
        worker_id = self._waiting[0].worker_id
        request = self._new(worker_id)
        size = 0
        share = max(_TOGETHER, math.ceil(len(self._waiting) / (_CALLS - self._sent)))
        while self._waiting and size < CALL_BYTES and len(offers) < share:
            if self._waiting[0].worker_id != worker_id:
                break
            offer = self._waiting.popleft()
            if offer.result.done():  # the caller that offered it was cancelled
                continue
            try:
                size += offer.add(request)
            except Exception as error:  # of this one alone
                _settle(offer, error)
                continue
            offers.append(offer)
        return offers, request


def _outcome(result: ResultT) -> ResultT | Exception:
    return errors.restore(result.error, result.message) if result.error else result


def _settle(offer: _Offer[RequestT, ResultT], outcome: ResultT | Exception) -> None:
    if offer.result.done():
        return
    if isinstance(outcome, Exception):
        offer.result.set_exception(outcome)
    else:
        offer.result.set_result(outcome)
