"""Which earlier answer a prompt of token ids continues, and how many ids are looked at for it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.v1 import buffer_service_pb2 as pb
from areal_rollout.ledger_calls import _CHUNK, _LAST, LedgerCalls, _end_of
from areal_rollout.session_cache import CachedCalls


def session(calls: list[tuple[int | None, list[int], list[int]]]) -> LedgerCalls:
    """A session of calls: what each extends, its own ids of the prompt, its answer."""
    cached = CachedCalls()
    for number, (extends, prompt, answer) in enumerate(calls):
        stored = pb.SessionPrompt(call_id=str(number), token_ids=prompt)
        if extends is not None:
            stored.extends = extends
        call = pb.SessionCall(number=number, prompt=stored)
        call.answer.token_ids.extend(answer)
        cached.add([call])
    nothing: Any = None
    return LedgerCalls(nothing, pb.GetSessionResponse(), 0, cached)


IDS = st.lists(st.integers(1, 2), max_size=3)


@given(st.lists(st.tuples(IDS, IDS, st.booleans()), max_size=6), IDS, st.data())
def test_prompt_when_any_then_it_continues_the_longest_conversation_that_it_begins_with(
    made: list[tuple[list[int], list[int], bool]], more: list[int], data: st.DataObject
) -> None:
    calls: list[tuple[int | None, list[int], list[int]]] = []
    wholes: list[list[int]] = []
    for number, (prompt, answer, continues) in enumerate(made):
        answered = [each for each in range(number) if calls[each][2]]
        extends = data.draw(st.sampled_from(answered)) if continues and answered else None
        calls.append((extends, prompt, answer))
        wholes.append([*(wholes[extends] if extends is not None else []), *prompt, *answer])
    ids = [*data.draw(st.sampled_from([[], *wholes])), *more]
    found, length = session(calls)._extends(ids)
    fitting = [
        number
        for number, whole in enumerate(wholes)
        if calls[number][2] and ids[: len(whole)] == whole
    ]
    assert length == max((len(wholes[number]) for number in fitting), default=0)
    assert found is None if not fitting else wholes[found or 0] == ids[:length]


class Counted(list[int]):
    """Notes how many ids were taken."""

    taken = 0

    def __getitem__(self, at: Any) -> Any:
        found = super().__getitem__(at)
        self.taken += len(found) if isinstance(at, slice) else 1
        return found


@pytest.mark.parametrize("place", [0, 700, -1, -5])
@pytest.mark.parametrize("length", [2000, 100_000])
def test_prompt_when_every_answer_splits_then_few_ids_of_each_earlier_call_are_looked_at(
    length: int, place: int
) -> None:
    """What changes is near the beginning, or in the answer."""
    earlier, answer = Counted(range(length)), Counted(range(20))
    ids = [*earlier, *answer, *range(30)]
    ids[place if place >= 0 else length + 20 + place] += 1
    earlier.taken = answer.taken = 0
    assert _end_of(ids, 0, (earlier, answer)) is None
    assert earlier.taken + answer.taken <= _CHUNK + _LAST
