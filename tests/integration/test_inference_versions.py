"""Every token carries the version that sampled it, and that version's logprob.

The server is driven over HTTP while its weights change in the middle of generation; the reference
is transformers. With in-place updates the cache keeps the keys and values of older versions, so
the reference rebuilds it segment by segment, each with its own version's weights.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from tests.inference_server import make_model, running_server
from transformers import DynamicCache

TOLERANCE = 1e-4
UPDATES = 5
STEP = 20
"""Tokens between an update and the next, at least."""
TOKENS = 6000
"""Never reached: requests are aborted after the last update, so that a client that lags behind
the engine cannot be late for an update."""


class Fleet:
    """One server and the models it is switched between; their seeds make them all different."""

    def __init__(self, url: str, folders: list[Path], models: list[Any]):
        self.url = url
        self.folders = folders
        self.models = models

    def model(self, version: str) -> Any:
        return self.models[int(version.removeprefix("v"))]


@pytest.fixture(scope="module", params=["qwen2", "llama"])
def fleet(request: pytest.FixtureRequest, tmp_path_factory) -> Iterator[Fleet]:
    root = tmp_path_factory.mktemp("models")
    folders = [root / f"v{index}" for index in range(UPDATES + 1)]
    models = [
        make_model(f, request.param, seed=10 + i, max_position_embeddings=8192)
        for i, f in enumerate(folders)
    ]
    with running_server(folders[0], "--weight-version", "v0", "--random-seed", "5") as server:
        yield Fleet(server.url, folders, models)


@pytest.fixture
async def http(fleet: Fleet):
    timeout = aiohttp.ClientTimeout(total=100)
    async with aiohttp.ClientSession(fleet.url, timeout=timeout) as session:
        yield session
        await post(session, "/continue_generation", {})
        await update(session, fleet, 0)


async def post(http: aiohttp.ClientSession, path: str, body: Any) -> Any:
    async with http.post(path, json=body) as response:
        answer = await response.text()
        assert response.status == 200, answer
        return json.loads(answer) if answer else None


async def update(http: aiohttp.ClientSession, fleet: Fleet, version: int, **values: Any) -> None:
    folder = str(fleet.folders[version])
    body = {"model_path": folder, "weight_version": f"v{version}", **values}
    await post(http, "/update_weights_from_disk", body)


def bodies(temperature: float = 0.8) -> list[dict[str, Any]]:
    """A group that shares a prompt, single prompts of several lengths, greedy and seeded ones."""
    params = {"max_new_tokens": TOKENS, "ignore_eos": True, "temperature": temperature}
    shared = list(range(2, 30))
    return [
        *[{"input_ids": shared, "sampling_params": params, "extra_key": "0"} for _ in range(4)],
        {"input_ids": [7], "sampling_params": params},
        {"input_ids": list(range(3, 103)), "sampling_params": params},
        {"input_ids": [9, 8, 7], "sampling_params": {**params, "temperature": 0.0}},
        {"input_ids": [5, 5], "sampling_params": {**params, "sampling_seed": 3, "top_k": 20}},
    ]


async def generate_all(http: aiohttp.ClientSession, requests: list[dict[str, Any]]) -> list[Any]:
    """The answers, logprobs included."""
    return await asyncio.gather(
        *[post(http, "/generate", {**body, "return_logprob": True}) for body in requests]
    )


async def all_running(http: aiohttp.ClientSession, count: int) -> None:
    """Returns when this many requests are being decoded."""
    async with asyncio.timeout(60):
        running = 0
        while running < count:
            async with http.get("/v1/loads") as response:
                running = (await response.json())["loads"][0]["num_running_reqs"]


class Metronome:
    """A streaming request beside the others: `advance(n)` returns when it has n more tokens."""

    def __init__(self, http: aiohttp.ClientSession):
        self._http = http
        self._count = 0

    async def __aenter__(self) -> Metronome:
        params = {"max_new_tokens": TOKENS, "ignore_eos": True}
        body = {"input_ids": [3], "stream": True, "sampling_params": params}
        self._response = await self._http.post("/generate", json=body, read_bufsize=1 << 20)
        await self.advance(1)
        return self

    async def __aexit__(self, *error: object) -> None:
        self._response.close()

    async def advance(self, count: int) -> None:
        target = self._count + count
        async with asyncio.timeout(60):
            while self._count < target:
                line = await self._response.content.readline()
                assert line, "the metronome's stream ended"
                if line.startswith(b"data: {"):
                    self._count = len(json.loads(line[6:])["output_ids"])


def spans(answer: Any) -> list[tuple[str, int, int]]:
    found = [(s["version"], s["start"], s["end"]) for s in answer["meta_info"]["weight_versions"]]
    assert found[0][1] == 0
    assert found[-1][2] == len(answer["output_ids"])
    assert all(a[2] == b[1] for a, b in pairwise(found))
    return found


def chosen(logits: torch.Tensor, tokens: list[int], temperature: float) -> torch.Tensor:
    logprobs = torch.log_softmax(logits / (temperature or 1.0), -1)
    return logprobs.gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1)


@torch.no_grad()
def segmented(fleet: Fleet, body: dict[str, Any], answer: Any) -> torch.Tensor:
    """Logprobs with a cache whose every position was computed by the weights of its time.

    Output token j is sampled from the position before it, which those same weights computed.
    """
    prompt, output = body["input_ids"], answer["output_ids"]
    sequence = prompt + output
    cache, done, found = DynamicCache(), 0, []
    for version, start, end in spans(answer):
        stop = len(prompt) - 1 + end
        ids = torch.tensor([sequence[done:stop]])
        logits = fleet.model(version)(ids, past_key_values=cache, use_cache=True).logits[0]
        found.append(
            chosen(logits[start - end :], output[start:end], body["sampling_params"]["temperature"])
        )
        done = stop
    return torch.cat(found)


@torch.no_grad()
def clean(fleet: Fleet, body: dict[str, Any], answer: Any) -> torch.Tensor:
    """Logprobs with everything computed by the weights of the token's own version."""
    prompt, output = body["input_ids"], answer["output_ids"]
    found = []
    for version, start, end in spans(answer):
        logits = fleet.model(version)(torch.tensor([prompt + output[:end]])).logits[0]
        at = logits[len(prompt) - 1 + start : len(prompt) - 1 + end]
        found.append(chosen(at, output[start:end], body["sampling_params"]["temperature"]))
    return torch.cat(found)


def reported(answer: Any) -> torch.Tensor:
    return torch.tensor([entry[0] for entry in answer["meta_info"]["output_token_logprobs"]])


async def run_with_updates(http, fleet: Fleet, mode: str):
    """All bodies, with UPDATES weight updates spread over the generation."""
    requests = bodies()
    generating = asyncio.create_task(generate_all(http, requests))
    await all_running(http, len(requests))
    async with Metronome(http) as metronome:
        await metronome.advance(STEP)
        for version in range(1, UPDATES + 1):
            await post(http, "/pause_generation", {"mode": mode})
            await update(http, fleet, version, flush_cache=mode == "retract")
            await post(http, "/continue_generation", {})
            await metronome.advance(STEP)
        await post(http, "/abort_request", {"abort_all": True})
        return requests, await generating


async def test_logprobs_when_updated_in_place_then_equal_segmented_rebuild(http, fleet):
    requests, answers = await run_with_updates(http, fleet, "in_place")
    drift = 0.0
    for body, answer in zip(requests, answers, strict=True):
        assert [name for name, _, _ in spans(answer)] == [f"v{i}" for i in range(UPDATES + 1)]
        assert answer["meta_info"]["num_retractions"] == 0
        assert answer["meta_info"]["weight_version"] == f"v{UPDATES}"
        got = reported(answer)
        torch.testing.assert_close(got, segmented(fleet, body, answer), atol=TOLERANCE, rtol=0)
        drift = max(drift, float((got - clean(fleet, body, answer)).abs().max()))
    # The check has teeth: older entries of the cache do show in the logprobs.
    assert drift > 100 * TOLERANCE


async def test_logprobs_when_retracted_then_equal_clean_recompute(http, fleet):
    requests, answers = await run_with_updates(http, fleet, "retract")
    for body, answer in zip(requests, answers, strict=True):
        assert [name for name, _, _ in spans(answer)] == [f"v{i}" for i in range(UPDATES + 1)]
        assert answer["meta_info"]["num_retractions"] == UPDATES
        expected = clean(fleet, body, answer)
        torch.testing.assert_close(reported(answer), expected, atol=TOLERANCE, rtol=0)


async def test_logprobs_when_aborted_and_continued_then_equal_clean_recompute(http, fleet):
    """The client's way: abort returns partials, and prompt + partial is a new request."""
    requests = bodies()
    generating = asyncio.create_task(generate_all(http, requests))
    await all_running(http, len(requests))
    async with Metronome(http) as metronome:
        await metronome.advance(2 * STEP)
        await post(http, "/pause_generation", {"mode": "abort"})
    answers = await generating
    await update(http, fleet, 1)
    rest = [
        {
            **body,
            "input_ids": body["input_ids"] + answer["output_ids"],
            "sampling_params": {**body["sampling_params"], "max_new_tokens": 50},
        }
        for body, answer in zip(requests, answers, strict=True)
    ]
    continued = asyncio.create_task(generate_all(http, rest))
    await post(http, "/continue_generation", {})
    for body, answer in zip(requests, answers, strict=True):
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"
        assert 0 < len(answer["output_ids"]) < TOKENS
        assert [name for name, _, _ in spans(answer)] == ["v0"]
        expected = clean(fleet, body, answer)
        torch.testing.assert_close(reported(answer), expected, atol=TOLERANCE, rtol=0)
    for body, answer in zip(rest, await continued, strict=True):
        assert [name for name, _, _ in spans(answer)] == ["v1"]
        assert len(answer["output_ids"]) == 50
        expected = clean(fleet, body, answer)
        torch.testing.assert_close(reported(answer), expected, atol=TOLERANCE, rtol=0)


async def test_pause_when_updating_in_place_then_nothing_is_aborted_or_recomputed(http, fleet):
    """Weights are read before they are swapped, and a swap falls between two decode steps."""
    params = {"max_new_tokens": 300, "ignore_eos": True}
    requests = [{"input_ids": [2 + i], "sampling_params": params} for i in range(16)]
    generating = asyncio.create_task(generate_all(http, requests))
    await all_running(http, len(requests))
    async with Metronome(http) as metronome:
        await metronome.advance(STEP)
        for version in (1, 2):
            await post(http, "/pause_generation", {"mode": "in_place"})
            await update(http, fleet, version, flush_cache=False)
            await post(http, "/continue_generation", {})
        answers = await generating
    for answer in answers:
        assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 300}
        assert answer["meta_info"]["num_retractions"] == 0
