"""What /generate answers, the same from the embedded engine and from SGLang.

Where the two differ on purpose a test says so: look for `http.engine.real`.
"""

from __future__ import annotations

import asyncio
import json

import pytest
import torch
from tests.contract.engines import CONTEXT, Http, chosen, output_logprobs, reference

from areal_rollout.generation.protocol import error_message

TOLERANCE = 1e-4
PROMPT = [5, 17, 99, 3, 42]
EOS = 1


def finish(answer) -> dict:
    return answer["meta_info"]["finish_reason"]


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)


# ------------------------------------------------------------------ sampling


async def test_generate_when_greedy_then_tokens_and_logprobs_are_those_of_transformers(http: Http):
    answer = await http.generate(
        PROMPT, max_new_tokens=40, temperature=0, ignore_eos=True, extra={"logprob_start_len": 0}
    )
    tokens, meta = answer["output_ids"], answer["meta_info"]
    logits = reference(http.engine.models[0], PROMPT, tokens)
    assert tokens == logits.argmax(-1).tolist()
    close(output_logprobs(answer), chosen(logits, tokens))
    assert [entry[1] for entry in meta["output_token_logprobs"]] == tokens
    # The prompt's: nothing for its first token, then what each of the others had.
    entries = meta["input_token_logprobs"]
    assert [entry[:2] for entry in entries[:1]] == [[None, PROMPT[0]]]
    whole = reference(http.engine.models[0], PROMPT[:1], PROMPT[1:])
    close(torch.tensor([entry[0] for entry in entries[1:]]), chosen(whole, PROMPT[1:]))
    assert meta["prompt_tokens"] == len(PROMPT)
    assert meta["completion_tokens"] == len(tokens) == 40
    assert meta["weight_version"] == "0"
    assert meta["weight_versions"] == [{"version": "0", "start": 0, "end": 40}]
    assert finish(answer) == {"type": "length", "length": 40}


async def test_generate_when_top_logprobs_of_the_prompt_then_they_are_the_likeliest_ids(
    http: Http,
):
    extra = {"logprob_start_len": 1, "top_logprobs_num": 4}
    answer = await http.generate(PROMPT, max_new_tokens=1, temperature=0, extra=extra)
    entries = answer["meta_info"]["input_top_logprobs"]
    assert entries[0] is None
    assert len(entries) == len(PROMPT) - 1, "of the token at logprob_start_len and those after it"
    whole = reference(http.engine.models[0], PROMPT[:2], PROMPT[2:])
    for entry, logits in zip(entries[1:], whole, strict=True):
        best, ids = torch.log_softmax(logits, -1).topk(4)
        assert [token for _, token, _ in entry] == ids.tolist()
        close(torch.tensor([logprob for logprob, _, _ in entry]), best)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"temperature": 0.5},
        {"temperature": 1.7},
        {"temperature": 0.8, "top_p": 0.7},
        {"temperature": 0.8, "top_k": 5},
        {"temperature": 1.3, "top_k": 20, "top_p": 0.9},
    ],
)
async def test_logprobs_when_sampled_then_of_the_temperature_scaled_distribution(http, params):
    """Scaled by the temperature; not renormalized over what top_k and top_p leave."""
    answers = await http.generate([PROMPT] * 6, max_new_tokens=24, ignore_eos=True, **params)
    temperature = params["temperature"]
    for answer in answers:
        tokens = answer["output_ids"]
        logits = reference(http.engine.models[0], PROMPT, tokens)
        close(output_logprobs(answer), chosen(logits, tokens, temperature))
        probabilities = torch.softmax(logits / temperature, -1)
        for row, token in zip(probabilities, tokens, strict=True):
            above = row[row > row[token] + 1e-6]
            assert len(above) < params.get("top_k", len(row))
            # A token is in the nucleus when those more likely than it do not fill it already.
            assert above.sum() <= params.get("top_p", 1.0) + 1e-4
    assert len({tuple(answer["output_ids"]) for answer in answers}) > 1


async def test_generate_when_top_k_is_one_then_greedy(http: Http):
    params = {"max_new_tokens": 12, "ignore_eos": True}
    answer = await http.generate(PROMPT, temperature=0.7, top_k=1, **params)
    greedy = await http.generate(PROMPT, temperature=0, **params)
    assert answer["output_ids"] == greedy["output_ids"]


async def test_generate_when_a_stop_token_comes_then_it_is_the_last(http: Http):
    free = await http.generate(PROMPT, max_new_tokens=40, temperature=0, ignore_eos=True)
    stop = free["output_ids"][10]
    first = free["output_ids"].index(stop)
    answer = await http.generate(PROMPT, max_new_tokens=40, temperature=0, stop_token_ids=[stop])
    assert answer["output_ids"] == free["output_ids"][: first + 1]
    assert finish(answer) == {"type": "stop", "matched": stop}
    assert len(output_logprobs(answer)) == first + 1
    ignored = await http.generate(
        PROMPT, max_new_tokens=40, temperature=0, stop_token_ids=[stop], ignore_eos=True
    )
    assert ignored["output_ids"] == free["output_ids"]


async def test_generate_when_min_new_tokens_then_stop_tokens_are_masked_before_it(http: Http):
    """The logprobs are those of the distribution that was sampled from: without the masked."""
    free = await http.generate(PROMPT, max_new_tokens=8, temperature=0, ignore_eos=True)
    stop = free["output_ids"][0]
    answer = await http.generate(
        PROMPT, max_new_tokens=30, min_new_tokens=6, temperature=0, stop_token_ids=[stop]
    )
    tokens = answer["output_ids"]
    assert stop not in tokens[:6]
    assert len(tokens) >= 6
    logits = reference(http.engine.models[0], PROMPT, tokens)
    logits[:6, [stop, EOS]] = float("-inf")
    assert tokens == logits.argmax(-1).tolist()
    close(output_logprobs(answer), chosen(logits, tokens))


async def test_generate_when_the_prompt_fills_the_context_then_six_positions_stay_free(http: Http):
    answer = await http.generate([7] * (CONTEXT - 7), max_new_tokens=5, ignore_eos=True)
    assert finish(answer) == {"type": "length", "length": 5}
    status, _ = await http.post("/generate", {"input_ids": [7] * (CONTEXT - 6)})
    assert status == 400
    assert (await http.get("/server_info"))[1]["max_req_input_len"] == CONTEXT - 6


async def test_generate_when_several_prompts_or_samples_then_a_list_in_order(http: Http):
    prompts = [PROMPT, [9, 9], [4]]
    greedy = {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}
    answers = await http.generate(prompts, **greedy)
    for prompt, answer in zip(prompts, answers, strict=True):
        alone = await http.generate(prompt, **greedy)
        assert answer["output_ids"] == alone["output_ids"]
    samples = await http.generate(PROMPT, max_new_tokens=6, n=3, ignore_eos=True)
    assert [len(sample["output_ids"]) for sample in samples] == [6, 6, 6]


async def test_generate_when_streamed_in_intervals_then_few_events_that_name_their_version(
    http: Http,
):
    """What the generation client relies on to keep the tokens of a server that dies."""
    params = {"max_new_tokens": 100, "temperature": 0, "ignore_eos": True, "stream_interval": 32}
    *events, done = await http.stream(PROMPT, **params)
    assert done == "[DONE]"
    metas = [json.loads(event)["meta_info"] for event in events]
    counts = [len(meta["output_token_logprobs"]) for meta in metas]
    assert counts[0] < 100  # the first at once; an event read late shows what there is then
    assert counts == sorted(counts)
    assert 2 <= len(counts) <= 6
    assert counts[-1] == 100
    assert {meta["weight_version"] for meta in metas} == {"0"}
    assert ["weight_versions" in meta for meta in metas] == [False] * (len(metas) - 1) + [True]


async def test_generate_when_streamed_then_cumulative_events_and_done(http: Http):
    *events, done = await http.stream(PROMPT, max_new_tokens=12, temperature=0, ignore_eos=True)
    assert done == "[DONE]"
    answers = [json.loads(event) for event in events]
    longest: list[int] = []
    for answer in answers:
        assert answer["output_ids"][: len(longest)] == longest
        longest = answer["output_ids"]
        assert len(output_logprobs(answer)) == len(longest)
    assert [finish(answer) for answer in answers[:-1]] == [None] * (len(answers) - 1)
    assert finish(answers[-1]) == {"type": "length", "length": 12}
    assert answers[-1]["meta_info"]["weight_versions"] == [{"version": "0", "start": 0, "end": 12}]
    whole = await http.generate(PROMPT, max_new_tokens=12, temperature=0, ignore_eos=True)
    assert longest == whole["output_ids"]


async def test_cache_when_extra_key_is_the_version_then_nothing_leaks_across_versions(http: Http):
    """In-place updates keep the prefix cache: the key is what keeps versions apart."""
    prompt = list(range(2, 90))
    greedy = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
    await http.generate(prompt, extra={"extra_key": "0"}, **greedy)
    await http.pause("in_place")
    await http.update(1, flush_cache=False)
    await http.resume()
    answer = await http.generate(prompt, extra={"extra_key": "1"}, **greedy)
    tokens = answer["output_ids"]
    close(output_logprobs(answer), chosen(reference(http.engine.models[1], prompt, tokens), tokens))


async def test_generate_when_many_at_once_then_each_as_if_alone(http: Http):
    prompts = [[2 + index, 3 + 2 * index, 4] for index in range(32)]
    params = {"max_new_tokens": 16, "temperature": 0, "ignore_eos": True}
    answers = await asyncio.gather(*(http.generate(prompt, **params) for prompt in prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens = answer["output_ids"]
        logits = reference(http.engine.models[0], prompt, tokens)
        close(output_logprobs(answer), chosen(logits, tokens))


# ------------------------------------------------------------------ bad input

BAD = [
    {},
    [],
    {"input_ids": "5"},
    {"input_ids": []},
    {"input_ids": [5, "6"]},
    {"input_ids": [5.5]},
    {"input_ids": [[5], 6]},
    {"input_ids": [5], "sampling_params": [1]},
    {"input_ids": [5], "stream": "yes"},
    {"input_ids": [5], "rid": 5},
    {"input_ids": [5] * CONTEXT, "sampling_params": {"max_new_tokens": 2}},
    *(
        {"input_ids": [5, 6], "sampling_params": params}
        for params in (
            {"max_tokens": 3},
            {"max_new_tokens": "3"},
            {"max_new_tokens": CONTEXT},
            {"max_new_tokens": 4, "min_new_tokens": 5},
            {"temperature": "hot"},
            {"temperature": -1},
            {"top_p": 0},
            {"top_p": 1.5},
            {"top_k": 0},
            {"stop_token_ids": 3},
            {"ignore_eos": 1},
        )
    ),
]


@pytest.mark.parametrize("body", BAD, ids=lambda body: json.dumps(body)[:60])
async def test_generate_when_bad_then_400_that_our_client_can_read(http: Http, body):
    status, answer = await http.post("/generate", body)
    assert status == 400
    words = error_message(json.dumps(answer).encode())
    assert words
    assert "\n" not in words
    assert not words.startswith("{")


STRICTER = [
    {"input_ids": [5], "text": "w5"},
    {"input_ids": [5], "sampling_params": {"max_new_tokens": 0}},
    {"input_ids": [5], "sampling_params": {"n": 0}},
    {"input_ids": [5], "sampling_params": {"stop_token_ids": [5000], "max_new_tokens": 2}},
    {"input_ids": [[5], [6]], "rid": "x", "sampling_params": {"max_new_tokens": 2}},
]


@pytest.mark.parametrize("body", STRICTER, ids=lambda body: json.dumps(body)[:60])
async def test_generate_when_sglang_is_lax_then_ours_refuses(http: Http, body):
    """SGLang guesses what is meant; the embedded engine says what is wrong."""
    status, _ = await http.post("/generate", body)
    assert status == (200 if http.engine.real else 400)


@pytest.mark.parametrize("token", [131, 5000])
async def test_generate_when_token_is_out_of_vocabulary_then_ours_refuses(http: Http, token):
    """SGLang's scheduler dies of it (test_engine_dangers): our client checks before it sends."""
    if not http.engine.real:
        status, answer = await http.post("/generate", {"input_ids": [5, token]})
        assert status == 400
        assert f"token id {token} is out of vocabulary" in error_message(
            json.dumps(answer).encode()
        )
    status, _ = await http.get("/health")
    assert status == 200
