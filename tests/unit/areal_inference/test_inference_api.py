"""What /generate accepts, refuses and answers."""

import pytest

from areal.request_fields import OutOfRange, WrongKind
from areal_inference.api import (
    Limits,
    parse_generate,
    render,
)

LIMITS = Limits(
    vocab_size=100, context_length=32, max_total_tokens=1000, eos_token_ids=frozenset({1})
)


def parse(body, encode=None):
    return parse_generate(body, LIMITS, encode)


def body(**values):
    return {"input_ids": [5, 6, 7], **values}


def with_params(**values):
    return body(sampling_params=values)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([], "expected a JSON object"),
        ({}, "exactly one of input_ids and text"),
        (body(text="x"), "exactly one of input_ids and text"),
        ({"input_ids": "5"}, "input_ids: expected a list"),
        ({"input_ids": [5, "6"]}, "input_ids: expected a list"),
        ({"input_ids": [5, 6.0]}, "input_ids: expected a list"),
        ({"input_ids": [5, True]}, "input_ids: expected a list"),
        ({"input_ids": [[5], 6]}, "input_ids: expected a list"),
        ({"text": 5}, "text: expected a string"),
        (body(sampling_params=[1]), "sampling_params: expected dict"),
        (with_params(max_tokens=3), "sampling_params.max_tokens: unknown field"),
        (with_params(max_new_tokens="3"), "max_new_tokens: expected a whole number, got '3'"),
        (with_params(temperature="hot"), "temperature: expected a number, got 'hot'"),
        (with_params(stop_token_ids=3), "stop_token_ids: expected a list"),
        (with_params(ignore_eos=1), "ignore_eos: expected true or false, got 1"),
        (body(stream="yes"), "stream: expected true or false, got 'yes'"),
        (body(rid=5), "rid: expected str"),
        ({"input_ids": [[5], [6]], "rid": "x"}, "rid: expected a list"),
        ({"input_ids": [[5], [6]], "rid": ["x"]}, "rid: 1 values for 2 prompts"),
    ],
)
def test_parse_when_malformed_then_schema_error_names_the_field(bad, message: str):
    with pytest.raises(WrongKind) as caught:
        parse(bad)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"input_ids": []}, "empty prompt"),
        ({"input_ids": [[5], []]}, "empty prompt"),
        ({"input_ids": [5, 100]}, "token id 100 is out of vocabulary, expected 0..99"),
        ({"input_ids": [-1]}, "token id -1 is out of vocabulary"),
        ({"input_ids": [5] * 32}, "longer than the model's context length (32 tokens)"),
        (
            {"input_ids": [5] * 26},
            "Input length (26 tokens) exceeds the maximum allowed length (26",
        ),
        (with_params(max_new_tokens=30), "3 tokens from the input and 30 for the completion"),
        (with_params(max_new_tokens=0), "max_new_tokens: expected 1 or more, got 0"),
        (with_params(max_new_tokens=4, min_new_tokens=5), "min_new_tokens: expected 0 to 4, got 5"),
        (with_params(temperature=-1), "temperature: expected 0 to 1e+06, got -1"),
        (with_params(top_p=0.0), "top_p: expected 1e-09 to 1, got 0.0"),
        (with_params(top_p=1.5), "top_p: expected 1e-09 to 1, got 1.5"),
        (with_params(top_k=0), "top_k: 0, expected -1 (all) or at least 1"),
        (with_params(stop_token_ids=[100]), "stop_token_ids"),
        (with_params(n=5000), "n: expected 1 to 4096, got 5000"),
        (with_params(min_p=0.1), "min_p: not supported"),
        (with_params(stop=["x"]), "stop: not supported"),
        (body(top_logprobs_num=2), "top_logprobs_num: only of prompts"),
        (body(top_logprobs_num=-1), "top_logprobs_num: expected 0 to 100, got -1"),
        ({"text": "hello"}, "no tokenizer"),
    ],
)
def test_parse_when_impossible_then_request_error_says_why(bad, message: str):
    with pytest.raises(OutOfRange) as caught:
        parse(bad)
    assert message in str(caught.value)


def test_parse_when_defaults_then_sglang_defaults():
    call = parse(body())
    (request,) = call.requests
    assert request.params.max_new_tokens == 29  # 128, clipped to the context
    assert request.params.temperature == 1.0
    assert request.params.top_k == -1
    assert request.params.stop_ids == {1}
    assert not call.as_list
    assert len(request.rid) == 32


def test_parse_when_neutral_or_unknown_extras_then_accepted():
    call = parse(
        {
            **with_params(min_p=0.0, repetition_penalty=1.0, stop=[], stream_interval=4),
            "some_future_field": 3,
            "lora_path": None,
        }
    )
    assert len(call.requests) == 1


def test_parse_when_ignoring_eos_then_no_stop_tokens_at_all():
    call = parse(with_params(ignore_eos=True, stop_token_ids=[7]))
    assert call.requests[0].params.stop_ids == frozenset()
    call = parse(with_params(stop_token_ids=[7]))
    assert call.requests[0].params.stop_ids == {1, 7}


def test_parse_when_several_prompts_and_samples_then_one_request_each():
    call = parse(
        {
            "input_ids": [[5], [6, 7]],
            "rid": ["a", "b"],
            "extra_key": "v3",
            "sampling_params": {"n": 2, "sampling_seed": 10, "max_new_tokens": 4},
        }
    )
    assert [r.rid for r in call.requests] == ["a_0", "a_1", "b_0", "b_1"]
    assert [r.input_ids for r in call.requests] == [[5], [5], [6, 7], [6, 7]]
    assert [r.params.seed for r in call.requests] == [10, 11, 10, 11]
    assert {r.extra_key for r in call.requests} == {"v3"}
    assert call.as_list


def test_parse_when_text_then_encoded():
    call = parse({"text": ["a b", "c"]}, encode=lambda text: [5] * len(text.split()))
    assert [r.input_ids for r in call.requests] == [[5, 5], [5]]
    assert call.as_list


def test_render_when_finished_then_sglang_shape():
    call = parse(body(return_logprob=True, logprob_start_len=1, rid="x"))
    (request,) = call.requests
    request.output_ids, request.logprobs = [8, 9, 1], [-0.1, -0.2, -0.3]
    request.input_logprobs = [-1.5]
    request.spans = [("v1", 0), ("v2", 2)]
    request.finish = {"type": "stop", "matched": 1}
    request.weight_version = "v2"
    answer = render(request, call, lambda ids, _skip: " ".join(map(str, ids)))
    assert answer["text"] == "8 9"
    assert answer["output_ids"] == [8, 9, 1]
    meta = answer["meta_info"]
    assert meta["id"] == "x"
    assert meta["finish_reason"] == {"type": "stop", "matched": 1}
    assert meta["prompt_tokens"] == 3
    assert meta["completion_tokens"] == 3
    assert meta["weight_version"] == "v2"
    assert meta["weight_versions"] == [
        {"version": "v1", "start": 0, "end": 2},
        {"version": "v2", "start": 2, "end": 3},
    ]
    assert meta["input_token_logprobs"] == [[None, 6, None], [-1.5, 7, None]]
    assert meta["output_token_logprobs"] == [[-0.1, 8, None], [-0.2, 9, None], [-0.3, 1, None]]
    assert meta["output_token_logprobs_length"] == 3


def test_render_when_unfinished_and_without_tokenizer_then_partial_and_no_text():
    call = parse(body(stream=True))
    (request,) = call.requests
    request.output_ids, request.logprobs = [8, 9], [-0.1]  # the engine is between two appends
    request.spans = [("v1", 0)]
    answer = render(request, call, None)
    assert answer["output_ids"] == [8]
    assert "text" not in answer
    assert answer["meta_info"]["finish_reason"] is None
    assert "weight_versions" not in answer["meta_info"]
    assert "output_token_logprobs" not in answer["meta_info"]
