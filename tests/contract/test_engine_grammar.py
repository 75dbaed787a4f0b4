"""Constrained decoding, the same on the embedded engine and on SGLang with its default backend."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator

import aiohttp
import pytest
import torch
from tests.contract.engines import (
    ENGINES,
    EngineUnderTest,
    Http,
    output_logprobs,
    reference,
    running_spelling,
)

from areal_torch.models.tiny import END_ID, make_tiny_model

PROMPT = [258, 49, 43, 50, 61, 259]
TOLERANCE = 1e-4
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


def tag(form) -> str:
    return json.dumps({"type": "structural_tag", "format": form})


def call(name):
    return {
        "type": "tag",
        "begin": f'<tool_call>\n{{"name": "{name}", "arguments": ',
        "content": {"type": "json_schema", "json_schema": SCHEMA},
        "end": "}\n</tool_call>",
    }


@pytest.fixture(scope="module", params=ENGINES)
def spelling(request, tmp_path_factory) -> Iterator[EngineUnderTest]:
    """An engine around a model whose tokens are bytes."""
    from transformers import AutoModelForCausalLM

    folder = make_tiny_model(
        tmp_path_factory.mktemp("spelling"),
        architecture="qwen3_moe" if request.param == "plain" else "qwen2",
        num_hidden_layers=1,
    )
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with running_spelling(request.param, folder, folder / "server.log") as (url, pid):
        yield EngineUnderTest(request.param, url, pid, [folder], [model])


@pytest.fixture
async def spelled(spelling) -> AsyncIterator[Http]:
    timeout = aiohttp.ClientTimeout(total=100)
    async with aiohttp.ClientSession(spelling.url, timeout=timeout) as session:
        yield Http(spelling, session)


def text(answer) -> str:
    return bytes(token for token in answer["output_ids"] if token < END_ID).decode()


@pytest.mark.parametrize("temperature", [1.0, 0.5])
async def test_logprobs_when_constrained_then_of_the_distribution_over_what_is_allowed(
    spelled: Http, temperature: float
):
    words = [{"type": "const_string", "value": word} for word in ("a", "b", "c")]
    form = tag({"type": "or", "elements": words})
    answers = await asyncio.gather(
        *(spelled.generate(PROMPT, structural_tag=form, temperature=temperature) for _ in range(8))
    )
    for answer in answers:
        ids = answer["output_ids"]
        assert text(answer) in ("a", "b", "c")
        assert ids[1:] == [END_ID]
        assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": END_ID}
        first = reference(spelled.engine.models[0], PROMPT, ids)[0] / temperature
        allowed = torch.tensor([ord("a"), ord("b"), ord("c")])
        expected = first[ids[0]] - torch.logsumexp(first[allowed], 0)
        found = output_logprobs(answer)
        torch.testing.assert_close(found[0], expected, atol=TOLERANCE, rtol=0)
        assert abs(found[1]) < TOLERANCE, "what is forced is certain"


async def test_calls_when_constrained_then_every_answer_is_made_of_them(spelled: Http):
    form = {
        "type": "tags_with_separator",
        "tags": [call("f"), call("g")],
        "separator": "\n",
        "at_least_one": True,
        "stop_after_first": True,
    }
    answers = await spelled.ok(
        "/generate",
        {
            "input_ids": [PROMPT] * 6,
            "sampling_params": {"structural_tag": tag(form), "max_new_tokens": 300},
            "return_logprob": True,
        },
    )
    names = set()
    for answer in answers:
        begin, _, rest = text(answer).partition("\n")
        call_made, _, end = rest.rpartition("\n")
        assert (begin, end) == ("<tool_call>", "</tool_call>")
        made = json.loads(call_made)
        names.add(made["name"])
        assert made["arguments"]["b"] in ("x", "y")
        assert len(output_logprobs(answer)) == len(answer["output_ids"])
    assert names <= {"f", "g"}


async def test_schema_and_regex_when_streamed_then_obeyed(spelled: Http):
    events = await spelled.stream(PROMPT, json_schema=json.dumps(SCHEMA), max_new_tokens=200)
    made = json.loads(text(json.loads(events[-2])))
    assert made["b"] in ("x", "y")
    answer = await spelled.generate(PROMPT, regex="[0-9]{3}", max_new_tokens=20)
    assert len(text(answer)) == 3
    assert text(answer).isdigit()


@pytest.mark.parametrize("stream", [False, True])
async def test_schema_when_it_is_none_then_400_and_the_server_goes_on(spelled: Http, stream: bool):
    params = {"json_schema": '{"type": "objekt"}', "max_new_tokens": 4}
    if stream and spelled.engine.real:  # it has sent the status when it finds out
        events = await spelled.stream(PROMPT, **params)
        finish = json.loads(events[0])["meta_info"]["finish_reason"]
        assert (finish["type"], finish["status_code"]) == ("abort", 400)
    else:
        body = {"input_ids": PROMPT, "sampling_params": params, "stream": stream}
        status, answer = await spelled.post("/generate", body)
        assert status == 400, answer
    assert len((await spelled.generate(PROMPT, max_new_tokens=2))["output_ids"]) >= 1


async def test_grammar_when_the_server_has_no_constrained_decoding_then_it_says_so(http: Http):
    body = {"input_ids": [5, 6], "sampling_params": {"regex": "w2", "max_new_tokens": 2}}
    status, answer = await http.post("/generate", body)
    said = "grammar-backend none" if http.engine.real else "no constrained decoding"
    assert status == 400
    assert said in json.dumps(answer)
