"""What the ledger knows of answers that arrived: a retry never drops one that an agent used."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from tests.ledger_support import Book
from tests.session_hops import Hops

from areal.agents.replies import Reply
from areal.errors import InvalidInput, NotFound
from areal.v1.buffer_service_pb2 import UpdateSessionRequest
from areal_buffer.sessions import check_update

BODY = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 8}
CHAT = "/v1/chat/completions"


@pytest.fixture
async def hops(book: Book) -> Hops:
    opened = Hops(book, letters=3)
    await opened.open("s")
    return opened


async def ask(hops: Hops, worker: Any, *, arrives: bool, **more: Any) -> Reply:
    """Sends a request; if its answer arrives, a gateway stores the receipt."""
    reply = await hops.reply(worker, CHAT, BODY | more.pop("body", {}), **more)
    assert reply.status == 200
    if arrives:
        await hops.store.update(check_update(UpdateSessionRequest.FromString(reply.receipt)))
    return reply


async def trained(hops: Hops, worker: Any) -> list[float]:
    """Ends the session; returns the rewards of its trajectories."""
    await hops.ask(worker, "/end", {"reward": -1.0})
    assert hops.groups.group is not None
    return [each.reward for each in hops.groups.group.trajectories]


async def test_retries_when_a_gateway_died_under_equal_requests_then_all_rewarded_answers_stay(
    hops,
):
    workers = [hops.worker() for _ in range(3)]
    for worker in [*workers, workers[0]]:
        await ask(hops, worker, arrives=False)
    for number in range(4):
        # The record of the last delivery is lost, too.
        reply = await ask(hops, workers[number % 3], arrives=number < 3, retry=1)
        known = orjson.loads(reply.body)["id"]
        await hops.ask(workers[0], "/v1/reward", {"completion_id": known, "reward": number})
    assert await trained(hops, workers[1]) == [0, 1, 2, 3]
    assert hops.dropped == [4]  # the first answers, which no one had


async def test_retry_when_an_equal_answer_arrived_then_only_the_one_that_did_not_is_dropped(hops):
    one, other = hops.worker(), hops.worker()
    await ask(hops, one, arrives=True, body={"n": 2})
    await ask(hops, other, arrives=False)
    await ask(hops, one, arrives=True, retry=1)
    assert len(await trained(hops, other)) == 3
    assert hops.dropped == [1]


async def test_request_when_it_has_an_idempotency_key_then_its_own_first_answer_is_dropped(hops):
    worker = hops.worker()
    await ask(hops, worker, arrives=False, **{"Idempotency-Key": "mine"})
    kept = await ask(hops, worker, arrives=False, **{"Idempotency-Key": "another"})
    await ask(hops, worker, arrives=True, **{"Idempotency-Key": "mine"})
    assert len(await trained(hops, worker)) == 2
    ids = [each.input_ids.tolist() for each in hops.groups.group.trajectories]
    assert ids[0][-4] == 97 + 2  # the second answer's letter
    assert kept.receipt


async def test_receipt_when_it_names_no_answer_of_its_prompt_then_refused(hops):
    worker = hops.worker()
    reply = await ask(hops, worker, arrives=False)
    receipt = UpdateSessionRequest.FromString(reply.receipt)
    receipt.delivered.numbers[:] = [1]
    with pytest.raises(NotFound, match="prompt of answer 1 of session s: not in the ledger"):
        await hops.store.update(check_update(receipt))
    receipt.delivered.numbers[:] = []
    with pytest.raises(InvalidInput, match=r"delivered\.numbers: got 0, expected 1 to 128"):
        check_update(receipt)
    assert not (await hops.reply(worker, "/v1/models", method="GET")).receipt
