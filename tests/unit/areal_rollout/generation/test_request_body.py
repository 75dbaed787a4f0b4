"""What a server is asked for when an answer begins, or continues after an interruption."""

import orjson
import pytest

from areal.types import GenerationHyperparameters, LLMRequest, LLMResponse, StopReason
from areal_rollout.generation.protocol import ModelLimits, request_body


def body_of(*sampled: int) -> dict:
    """Of a request for at most 10 tokens, whose answers have so many."""
    request = LLMRequest([5, 6], GenerationHyperparameters(max_new_tokens=10))
    answers = [
        LLMResponse([5, 6], [7] * count, [-1.0] * count, [3] * count, StopReason.ABORT)
        for count in sampled
    ]
    rids = [str(number) for number in range(len(answers))]
    limits = ModelLimits(96, 64)
    return orjson.loads(
        request_body(
            request, answers, rids, extra_key="3", limits=limits, most=10, stream_interval=0
        )
    )


@pytest.mark.parametrize("sampled", [0, 4, 9])
def test_request_when_an_answer_continues_then_it_may_get_what_is_left(sampled: int) -> None:
    body = body_of(sampled)
    assert body["input_ids"] == [5, 6] + [7] * sampled
    assert body["sampling_params"]["max_new_tokens"] == 10 - sampled


def test_request_when_a_groups_answers_differ_then_each_may_get_what_is_left() -> None:
    params = body_of(1, 0, 9)["sampling_params"]
    assert [each["max_new_tokens"] for each in params] == [9, 10, 1]
