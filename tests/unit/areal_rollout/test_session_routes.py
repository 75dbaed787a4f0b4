"""Routes of a session's calls in the ledger: each token's once, for whoever reads the session."""

import numpy as np
import pytest
from tests.unit.areal.agents.ledger_in_memory import LedgerInMemory

from areal.agents.headers import Repeats
from areal.agents.tree import merge
from areal.types import LLMResponse, StopReason


def answered(prompt, output, mark):
    response = LLMResponse(
        list(prompt), list(output), [-1.0] * len(output), [0] * len(output), StopReason.STOP
    )
    if mark is not None:
        shape = (len(prompt) + len(output) - 1, 2, 2)
        response.routed_experts = np.full(shape, mark, dtype=np.uint8)
    return response


async def call(ledger, prompt, output, mark):
    store = ledger.worker()
    number = await store.begin(prompt, 1, Repeats())
    await store.record(number, answered(prompt, output, mark), "", [])
    return [*prompt, *output]


def marks(ledger):
    found = [each.response.routed_experts for each in ledger.calls()]
    return [None if each is None else each[:, 0, 0].tolist() for each in found]


async def test_session_when_calls_extend_each_other_then_routes_are_stored_once():
    ledger = LedgerInMemory()
    whole = await call(ledger, [1, 2], [3, 4], 5)
    whole = await call(ledger, [*whole, 9], [6, 7], 6)
    await call(ledger, [*whole, 9, 9], [8], 7)
    stored = [each.answer.routed_experts.shape[0] for each in ledger._calls]
    assert stored == [3, 3, 3]
    assert marks(ledger) == [
        [5, 5, 5],
        [5, 5, 5, 6, 6, 6],
        [5, 5, 5, 6, 6, 6, 7, 7, 7],
    ]


async def test_session_when_a_call_branches_then_it_continues_the_routes_of_its_own_parent():
    ledger = LedgerInMemory()
    root = await call(ledger, [1, 2], [3, 4], 5)
    await call(ledger, [*root, 9], [6, 7], 6)
    await call(ledger, [*root, 8], [6], 7)
    await call(ledger, [4, 4], [4], 8)
    assert marks(ledger)[2:] == [[5, 5, 5, 7, 7], [8, 8]]
    first, second, third = merge(ledger.calls(), 1.0).trajectories
    assert first.routed_experts[:, 0, 0].tolist() == [5, 5, 5, 6, 6, 6]
    assert second.routed_experts[:, 0, 0].tolist() == [5, 5, 5, 7, 7]
    assert third.routed_experts[:, 0, 0].tolist() == [8, 8]


@pytest.mark.parametrize("without", [0, 1, 2])
async def test_session_when_one_server_says_nothing_then_only_its_call_has_none(without):
    ledger = LedgerInMemory()
    whole: list[int] = [1, 2]
    for number in range(3):
        whole = await call(ledger, [*whole, 9], [6], None if number == without else number)
    found = marks(ledger)
    assert found[without] is None
    for number in {0, 1, 2} - {without}:
        assert len(found[number]) == 2 + 2 * number + 1
        assert found[number][-1] == number
