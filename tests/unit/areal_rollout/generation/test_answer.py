"""The body of a streamed answer: whose its events are, and what of them a broken stream leaves."""

import json
from itertools import permutations

import pytest

from areal.types import LLMResponse, StopReason
from areal_rollout.generation.answer import Answer
from areal_rollout.generation.protocol import ServerError, append_answers, append_event

VERSION = 4


class Stream:
    """What `Answer` needs of an HTTP response; its parts end anywhere in an event."""

    content_type = "text/event-stream"

    def __init__(self, *events, part=37):
        data = [event if isinstance(event, str) else json.dumps(event) for event in events]
        self.body = "".join(f"data: {each}\n\n" for each in data).encode()
        self.part = part
        self.content = self

    async def iter_any(self):
        for start in range(0, len(self.body), self.part):
            yield self.body[start : start + self.part]


def event(index, count, version="4", spans=None):
    """Sequence `index` so far; with `spans`, (version, end) each, it is the last."""
    tokens = tokens_of(index, count)
    meta = {
        "finish_reason": None if spans is None else {"type": "length"},
        "output_token_logprobs": [[-token / 100, token, None] for token in tokens],
    }
    if version is not None:
        meta["weight_version"] = version
    if spans is not None:
        starts = [0, *(end for _, end in spans)]
        meta["weight_versions"] = [
            {"version": of, "start": start, "end": end}
            for start, (of, end) in zip(starts, spans, strict=False)
        ]
    return {"output_ids": tokens, "meta_info": meta, "index": index}


def tokens_of(index, count):
    return [10 * index + place for place in range(count)]


def empty():
    return LLMResponse([1], [], [], [], StopReason.ABORT)


@pytest.mark.parametrize("order", list(permutations(range(3))))
async def test_group_when_its_events_come_in_any_order_then_each_answer_is_at_its_index(order):
    heard = []
    answer = Answer(VERSION, 3, lambda index, tokens: heard.append((index, tokens)))
    first = [event(index, 2) for index in order]
    last = [event(index, 4 + index, spans=[("4", 4 + index)]) for index in reversed(order)]
    responses = [empty() for _ in order]

    raw = await answer.read(Stream(*first, *last, "[DONE]"))

    append_answers(responses, raw, min_version=VERSION, vocab_size=100)
    assert [each.output_tokens for each in responses] == [tokens_of(i, 4 + i) for i in range(3)]
    assert heard == [
        *((index, tokens_of(index, 2)) for index in order),
        *((index, tokens_of(index, 4 + index)) for index in reversed(order)),
    ]


@pytest.mark.parametrize(
    ("versions", "kept"),
    [
        (["4", "4", "4"], 3),
        (["4", "4", None], 2),
        (["4", None, None], 1),
        ([None, None], 0),
        (["4", "5"], 1),
        (["4", ""], 1),
        (["4", "44"], 1),
    ],
)
async def test_stream_when_an_event_names_no_or_another_version_then_its_tokens_are_not_kept(
    versions, kept
):
    heard = []
    answer = Answer(VERSION, 2, lambda index, tokens: heard.append((index, len(tokens))))
    named = [event(1, count) for count in (1, 2)]  # its neighbor's events are all kept
    events = [event(0, count, version) for count, version in enumerate(versions, 1)]

    with pytest.raises(ServerError, match=r"before \[DONE\]"):
        await answer.read(Stream(named[0], *events, named[1]))

    response, other = empty(), empty()
    for index, raw in answer.partial.items():
        append_event([(response, other)[index]], raw, VERSION, min_version=VERSION, vocab_size=100)
    assert response.output_tokens == tokens_of(0, kept)
    assert response.output_versions == [VERSION] * kept
    assert other.output_tokens == tokens_of(1, 2)
    assert heard == [(1, 1), *((0, count) for count in range(1, kept + 1)), (1, 2)]


async def test_stream_when_it_breaks_after_a_last_event_then_tokens_have_the_versions_in_it():
    answer, response = Answer(VERSION), empty()
    last = event(0, 5, version=None, spans=[("4", 2), ("6", 5)])

    with pytest.raises(ServerError, match=r"before \[DONE\]"):
        await answer.read(Stream(event(0, 1), event(0, 3, version=None), last))

    append_event([response], answer.partial[0], VERSION, min_version=VERSION, vocab_size=100)
    assert response.output_tokens == tokens_of(0, 5)
    assert response.output_versions == [4, 4, 6, 6, 6]
    assert response.stop_reason is StopReason.LENGTH
