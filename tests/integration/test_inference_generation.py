"""SGLang's `/generate` over HTTP against a real server process; transformers are the reference.

Only the protocol is used here (url and model folder): the same tests can drive SGLang itself.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.integration.inference_http import events, generate, logprobs_of, post


def reference_logprobs(model: Any, prompt: list[int], output: list[int], temperature: float = 1.0):
    import torch

    with torch.no_grad():
        logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits / temperature, -1)


async def test_generate_when_greedy_then_equals_transformers(http, served):
    prompt = [5, 6, 7, 8, 9]
    answer = await generate(http, prompt, 40, params={"temperature": 0, "ignore_eos": True})
    output = answer["output_ids"]
    expected = reference_logprobs(served.model, prompt, output)
    assert output == expected.argmax(-1).tolist()
    best = expected.max(-1).values.tolist()
    assert logprobs_of(answer) == pytest.approx(best, abs=1e-4)
    meta = answer["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 40}
    assert meta["prompt_tokens"] == 5
    assert meta["completion_tokens"] == meta["output_token_logprobs_length"] == 40
    assert [entry[1:] for entry in meta["output_token_logprobs"]] == [[t, None] for t in output]
    assert meta["weight_version"] == "default"
    assert meta["weight_versions"] == [{"version": "default", "start": 0, "end": 40}]
    assert meta["input_token_logprobs"] == []


@pytest.mark.parametrize("temperature", [1.0, 0.5])
async def test_generate_when_many_at_once_then_each_logprob_is_its_own(http, served, temperature):
    """100 requests of different lengths through 32 rows: continuous batching mixes nothing up."""
    prompts = [[2 + (i * j) % 129 for j in range(1, 2 + i % 60)] for i in range(100)]
    params = {
        "temperature": temperature,
        "ignore_eos": True,
        "top_p": 0.95 if temperature < 1 else 1,
    }
    answers = await asyncio.gather(
        *[generate(http, p, 3 + i % 37, params=params) for i, p in enumerate(prompts)]
    )
    for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        output = answer["output_ids"]
        assert len(output) == 3 + index % 37
        expected = reference_logprobs(served.model, prompt, output, temperature)
        chosen = [float(expected[i, token]) for i, token in enumerate(output)]
        assert logprobs_of(answer) == pytest.approx(chosen, abs=1e-4)


async def test_generate_when_prompt_is_shared_then_cached_and_still_right(http, served):
    prompt = list(range(2, 60))
    answer = await generate(
        http, prompt, 20, params={"n": 8, "ignore_eos": True}, rid="g", extra_key="7"
    )
    assert [a["meta_info"]["id"] for a in answer] == [f"g_{i}" for i in range(8)]
    assert [a["meta_info"]["cached_tokens"] for a in answer] == [0] + [57] * 7
    assert len({tuple(a["output_ids"]) for a in answer}) == 8
    for one in answer:
        expected = reference_logprobs(served.model, prompt, one["output_ids"])
        chosen = [float(expected[i, token]) for i, token in enumerate(one["output_ids"])]
        assert logprobs_of(one) == pytest.approx(chosen, abs=1e-4)


async def test_generate_when_stop_token_then_kept_matched_and_trimmed_from_text(http):
    base = {"temperature": 0, "ignore_eos": False}
    free = await generate(http, [5, 6, 7], 12, params=base)
    stop = free["output_ids"][3]
    first = free["output_ids"].index(stop)
    answer = await generate(http, [5, 6, 7], 12, params={**base, "stop_token_ids": [stop]})
    assert answer["output_ids"] == free["output_ids"][: first + 1]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert answer["text"].split() == [f"w{i}" for i in answer["output_ids"][:-1]]
    params = {**base, "stop_token_ids": [stop], "min_new_tokens": 8}
    late = await generate(http, [5, 6, 7], 12, params=params)
    assert stop not in late["output_ids"][:8]


async def test_generate_when_input_logprobs_wanted_then_equal_transformers(http, served):
    import torch

    prompt = [5, 6, 7, 8, 9, 10]
    answer = await generate(http, prompt, 1, logprob_start_len=2)
    triples = answer["meta_info"]["input_token_logprobs"]
    assert triples[0] == [None, 7, None]
    assert [entry[1] for entry in triples] == prompt[2:]
    with torch.no_grad():
        logprobs = torch.log_softmax(served.model(torch.tensor([prompt])).logits[0], -1)
    expected = [float(logprobs[i - 1, prompt[i]]) for i in range(3, 6)]
    assert [entry[0] for entry in triples[1:]] == pytest.approx(expected, abs=1e-4)


async def test_generate_when_seeded_then_repeatable_alone_and_in_company(http):
    params = {"sampling_seed": 11, "ignore_eos": True}
    alone = await generate(http, [5, 6], 20, params=params)
    crowd = await asyncio.gather(
        *[generate(http, [7, 8 + i], 20, params={"ignore_eos": True}) for i in range(10)],
        generate(http, [5, 6], 20, params=params),
    )
    assert crowd[-1]["output_ids"] == alone["output_ids"]
    other = await generate(http, [5, 6], 20, params={**params, "sampling_seed": 12})
    assert other["output_ids"] != alone["output_ids"]


async def test_generate_when_text_and_list_then_array_with_text(http):
    status, answer = await post(
        http,
        "/generate",
        {"text": ["w5 w6 w7", "w9"], "sampling_params": {"max_new_tokens": 3, "temperature": 0}},
    )
    assert status == 200
    assert [a["meta_info"]["prompt_tokens"] for a in answer] == [3, 1]
    assert "output_token_logprobs" not in answer[0]["meta_info"]
    by_ids = await generate(http, [5, 6, 7], 3, params={"temperature": 0})
    assert answer[0]["output_ids"] == by_ids["output_ids"]
    assert answer[0]["text"] == by_ids["text"]


async def test_generate_when_streamed_then_cumulative_and_same_as_whole(http):
    params = {"max_new_tokens": 400, "temperature": 0, "ignore_eos": True}
    whole = await generate(http, [5, 6, 7], 400, params=params)
    body = {"input_ids": [5, 6, 7], "sampling_params": params, "return_logprob": True}
    seen = [event async for event in events(http, body)]
    assert seen[-1] is None
    *partial, last = seen[:-1]
    assert len(partial) >= 2
    for event in partial:
        count = event["meta_info"]["completion_tokens"]
        assert event["output_ids"] == whole["output_ids"][:count]
        assert len(event["meta_info"]["output_token_logprobs"]) == count
        assert event["meta_info"]["finish_reason"] is None
        assert "weight_versions" not in event["meta_info"]
    assert last["output_ids"] == whole["output_ids"]
    assert logprobs_of(last) == pytest.approx(logprobs_of(whole), abs=1e-5)
    assert last["meta_info"]["weight_versions"][-1]["end"] == 400


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"input_ids": [5, 131]}, "token id 131 is out of vocabulary"),
        ({"input_ids": [5] * 8192}, "The input (8192 tokens) is longer than the model's context"),
        ({"input_ids": [5], "sampling_params": {"max_new_tokens": 8192}}, "maximum context length"),
        ({"input_ids": []}, "empty prompt"),
    ],
)
async def test_generate_when_refused_then_400_with_one_line(http, body, message: str):
    status, answer = await post(http, "/generate", body)
    assert status == 400
    assert message in answer["error"]["message"]
    assert "\n" not in answer["error"]["message"]


@pytest.mark.parametrize(
    "body", [{"input_ids": "x"}, {"input_ids": [5], "sampling_params": {"max_tokens": 3}}, [], {}]
)
async def test_generate_when_malformed_then_400_of_object_error(http, body):
    status, answer = await post(http, "/generate", body)
    assert status == 400
    assert answer["object"] == "error"
    assert answer["message"]


async def test_generate_when_body_is_not_json_then_400(http):
    headers = {"Content-Type": "application/json"}
    async with http.post("/generate", data=b'{"input_ids": [1', headers=headers) as response:
        assert response.status == 400
        assert "not valid JSON" in (await response.json())["message"]
