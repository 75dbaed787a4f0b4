"""SGLang's protocol over HTTP against a real server process, with transformers as the reference.

Only the protocol is used here (url and model folder): the same tests can drive SGLang itself.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.inference_server import make_model, running_server, save_tokenizer


@dataclass
class Served:
    url: str
    folder: Path
    other: Path
    """A second model of the same shape."""
    wrong: Path
    """A model of another shape."""
    model: Any


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("models")
    model = make_model(root / "a", seed=1, max_position_embeddings=8192)
    save_tokenizer(root / "a")
    make_model(root / "b", seed=2, max_position_embeddings=8192)
    make_model(root / "wrong", vocab_size=137)
    with running_server(root / "a", "--max-running-requests", "32", "--random-seed", "3") as server:
        yield Served(server.url, root / "a", root / "b", root / "wrong", model)


@pytest.fixture
async def http(served: Served):
    timeout = aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(served.url, timeout=timeout) as session:
        yield session
        # Whatever a test did, the next one finds the first model, not paused.
        await post(session, "/continue_generation", {})
        await post(session, "/abort_request", {"abort_all": True})
        body = {"model_path": str(served.folder), "weight_version": "default"}
        assert (await post(session, "/update_weights_from_disk", body))[0] == 200


async def post(http: aiohttp.ClientSession, path: str, body: Any) -> tuple[int, Any]:
    async with http.post(path, json=body) as response:
        text = await response.text()
        return response.status, json.loads(text) if text.startswith(("{", "[")) else text


async def get(http: aiohttp.ClientSession, path: str) -> tuple[int, Any]:
    async with http.get(path) as response:
        text = await response.text()
        return response.status, json.loads(text) if text.startswith("{") else text


async def generate(http: aiohttp.ClientSession, ids: Any, new: int = 8, **values: Any) -> Any:
    params = {"max_new_tokens": new, **values.pop("params", {})}
    body = {"input_ids": ids, "return_logprob": True, "sampling_params": params, **values}
    status, answer = await post(http, "/generate", body)
    assert status == 200, answer
    return answer


async def events(http: aiohttp.ClientSession, body: Any):
    """Server-sent events of a streaming /generate, decoded."""
    request = http.post("/generate", json={**body, "stream": True}, read_bufsize=1 << 22)
    async with request as response:
        assert response.status == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        async for line in response.content:
            if line.startswith(b"data: "):
                data = line[6:].strip()
                yield None if data == b"[DONE]" else json.loads(data)


def reference_logprobs(model: Any, prompt: list[int], output: list[int], temperature: float = 1.0):
    import torch

    with torch.no_grad():
        logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits / temperature, -1)


def logprobs_of(answer: Any) -> list[float]:
    return [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]


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
    async with http.post("/generate", data=b'{"input_ids": [1') as response:
        assert response.status == 400
        assert "not valid JSON" in (await response.json())["message"]


async def first_token(http: aiohttp.ClientSession, body: Any) -> tuple[Any, list[Any]]:
    """Start a streaming request; returns the stream after its first event, and that event."""
    stream = events(http, body)
    return stream, [await anext(stream)]


# Outlasts any test by far: these requests are aborted.
LONG = {"max_new_tokens": 8000, "ignore_eos": True}


async def test_abort_when_running_then_partial_output_with_200(http):
    stream, seen = await first_token(
        http, {"rid": "victim", "input_ids": [5, 6], "sampling_params": LONG}
    )
    duplicate = await post(http, "/generate", {"rid": "victim", "input_ids": [5]})
    assert duplicate[0] == 400
    assert "already in use" in duplicate[1]["error"]["message"]
    assert await post(http, "/abort_request", {"rid": "vict"}) == (200, "")  # exact match only
    assert await post(http, "/abort_request", {"rid": "victim"}) == (200, "")
    seen += [event async for event in stream]
    assert seen[-1] is None
    last = seen[-2]
    reason = last["meta_info"]["finish_reason"]
    assert reason == {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
    assert 0 < len(last["output_ids"]) < 8000


async def test_abort_all_when_unknown_or_empty_then_200(http):
    assert await post(http, "/abort_request", {"rid": "nobody"}) == (200, "")
    assert await post(http, "/abort_request", {}) == (200, "")
    assert await post(http, "/abort_request", {"abort_all": True}) == (200, "")


async def metrics(http: aiohttp.ClientSession) -> dict[str, float]:
    _, text = await get(http, "/metrics")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    pairs = [line.rsplit(" ", 1) for line in lines]
    return {name.split("{")[0]: float(value) for name, value in pairs}


@pytest.mark.parametrize("stream", [True, False])
async def test_client_when_gone_then_its_requests_are_aborted(http, served, stream: bool):
    before = await metrics(http)
    async with aiohttp.ClientSession(served.url) as leaving:
        body = {"input_ids": [5, 6], "sampling_params": {**LONG, "n": 20}, "stream": stream}
        request = asyncio.create_task(leaving.post("/generate", json=body))
        async with asyncio.timeout(20):
            while (await metrics(http))["sglang:num_running_reqs"] < 20:
                pass
        request.cancel()
    async with asyncio.timeout(20):
        while (await metrics(http))["sglang:num_running_reqs"]:
            pass
    after = await metrics(http)
    aborted = "sglang:num_aborted_requests_total"
    assert after[aborted] - before[aborted] == 20


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_pause_when_resumed_then_request_finishes_in_full(http, mode: str):
    params = {"max_new_tokens": 2000, "temperature": 0, "ignore_eos": True}
    whole = await generate(http, [5, 6, 7], 2000, params=params)
    body = {"input_ids": [5, 6, 7], "sampling_params": params}
    stream, seen = await first_token(http, body)
    status, answer = await post(http, "/pause_generation", {"mode": mode})
    assert (status, answer["status"]) == (200, "ok")
    assert answer["message"] == "Generation paused successfully."
    waiting = asyncio.create_task(generate(http, [9], 2))
    done, _ = await asyncio.wait({waiting}, timeout=0.2)
    assert not done
    assert (await get(http, "/health"))[0] == 200
    assert (await get(http, "/ready"))[0] == 503
    flushed = await post(http, "/flush_cache", {})
    assert flushed[0] == (200 if mode == "retract" else 400)
    answer = (await post(http, "/continue_generation", {}))[1]
    assert answer == {"message": "Generation continued successfully.", "status": "ok"}
    seen += [event async for event in stream]
    last = seen[-2]
    assert last["output_ids"] == whole["output_ids"]
    assert last["meta_info"]["num_retractions"] == (mode == "retract")
    assert len((await waiting)["output_ids"]) == 2


async def test_pause_when_abort_then_partials_come_back_at_once(http):
    stream, seen = await first_token(http, {"input_ids": [5], "sampling_params": LONG})
    assert (await post(http, "/pause_generation", {}))[0] == 200
    seen += [event async for event in stream]
    assert seen[-2]["meta_info"]["finish_reason"]["type"] == "abort"
    assert (await post(http, "/flush_cache", {}))[0] == 200


@pytest.mark.parametrize("timeout", ["nan", "inf", "-1", "1e9", "soon"])
async def test_flush_when_its_timeout_is_no_time_then_400(http, timeout):
    status, answer = await post(http, f"/flush_cache?timeout={timeout}", {})
    assert (status, "timeout" in str(answer)) == (400, True)


async def test_pause_when_mode_is_unknown_then_400(http):
    status, answer = await post(http, "/pause_generation", {"mode": "softly"})
    assert status == 400
    assert "softly" in answer["message"]
    status, answer = await post(http, "/pause_generation", {"mod": "abort"})
    assert status == 400
    assert "unknown field 'mod'" in answer["message"]


async def test_update_when_folder_is_wrong_then_400_and_nothing_changes(http, served, tmp_path):
    before = (await post(http, "/weights_checker", {"action": "checksum"}))[1]
    for folder, message in (
        (served.wrong, "model.embed_tokens.weight has shape [137, 64], expected [131, 64]"),
        (tmp_path, "no model.safetensors"),
        (tmp_path / "nothing", "no model.safetensors"),
    ):
        body = {"model_path": str(folder), "weight_version": "bad"}
        status, answer = await post(http, "/update_weights_from_disk", body)
        assert status == 400
        assert answer["success"] is False
        assert message in answer["message"]
    assert (await post(http, "/weights_checker", {"action": "checksum"}))[1] == before
    assert (await get(http, "/model_info"))[1]["weight_version"] == "default"


async def test_update_when_done_then_new_weights_version_and_checksum(http, served):
    before = (await post(http, "/weights_checker", {"action": "checksum"}))[1]
    body = {"model_path": str(served.other), "weight_version": "v1"}
    status, answer = await post(http, "/update_weights_from_disk", body)
    assert (status, answer["success"], answer["num_paused_requests"]) == (200, True, 0)
    assert answer["message"] == ("Succeeded to update model weights. Weight version updated to v1.")
    info = (await get(http, "/model_info"))[1]
    assert (info["weight_version"], info["model_path"]) == ("v1", str(served.other))
    state = (await get(http, "/server_info"))[1]
    assert state["weight_version"] == "default"
    assert state["internal_states"][0]["weight_version"] == "v1"
    after = (await post(http, "/weights_checker", {"action": "checksum"}))[1]
    assert after["success"]
    assert after["per_engine_checksum"] != before["per_engine_checksum"]
    answer = await generate(http, [5, 6], 3)
    assert answer["meta_info"]["weight_version"] == "v1"


async def held_newcomer(http: aiohttp.ClientSession) -> asyncio.Task[Any]:
    """A request that a pending update holds back. Those sent before it waits are served as ever."""
    number = 0
    while True:
        number += 1
        params, rid = {"ignore_eos": True}, f"newcomer-{number}"
        late = asyncio.create_task(generate(http, [7], 3, params=params, rid=rid))
        while not late.done():
            waits = (await get(http, "/waits"))[1]["waits"]
            if any(w["what"] == "held_request" and w["on"] == "a weight update" for w in waits):
                return late
        versions = late.result()["meta_info"]["weight_versions"]
        assert versions == [{"version": "default", "start": 0, "end": 3}]


async def test_update_when_requests_run_then_it_waits_and_newcomers_wait_for_it(http, served):
    params = {"max_new_tokens": 8000, "ignore_eos": True}
    stream, seen = await first_token(
        http, {"rid": "before", "input_ids": [5], "sampling_params": params}
    )
    body = {"model_path": str(served.other), "weight_version": "v1"}
    update = asyncio.create_task(post(http, "/update_weights_from_disk", body))
    late = await held_newcomer(http)
    seen += [await anext(stream) for _ in range(3)]  # it runs on, and both wait for it
    assert not update.done()
    assert not late.done()
    await post(http, "/abort_request", {"rid": "before"})
    seen += [event async for event in stream]
    last = seen[-2]
    count = len(last["output_ids"])
    spans = [{"version": "default", "start": 0, "end": count}]
    assert last["meta_info"]["weight_versions"] == spans
    assert (await update)[0] == 200
    versions = (await late)["meta_info"]["weight_versions"]
    assert versions == [{"version": "v1", "start": 0, "end": 3}]


async def test_update_when_told_to_abort_then_running_requests_end_partially(http, served):
    stream, seen = await first_token(http, {"input_ids": [5], "sampling_params": LONG})
    body = {
        "model_path": str(served.other),
        "weight_version": "v1",
        "abort_all_requests": True,
    }
    assert (await post(http, "/update_weights_from_disk", body))[0] == 200
    seen += [event async for event in stream]
    assert seen[-2]["meta_info"]["finish_reason"]["type"] == "abort"
    assert seen[-2]["meta_info"]["weight_versions"][-1]["version"] == "default"


async def test_update_when_paused_in_place_and_flushing_then_400_and_nothing_changes(http, served):
    stream, seen = await first_token(http, {"input_ids": [5], "sampling_params": LONG})
    await post(http, "/pause_generation", {"mode": "in_place"})
    body = {"model_path": str(served.other), "weight_version": "v1"}
    status, answer = await post(http, "/update_weights_from_disk", body)
    assert status == 400
    assert "flush_cache" in answer["message"]
    assert (await get(http, "/model_info"))[1]["weight_version"] == "default"
    status, answer = await post(http, "/update_weights_from_disk", {**body, "flush_cache": False})
    assert (status, answer["num_paused_requests"]) == (200, 1)
    await post(http, "/continue_generation", {})
    await generate(http, [9], 1)
    await post(http, "/abort_request", {"abort_all": True})
    seen += [event async for event in stream]
    names = [s["version"] for s in seen[-2]["meta_info"]["weight_versions"]]
    assert names == ["default", "v1"]


async def test_update_when_paused_and_idle_then_fine(http, served):
    await post(http, "/pause_generation", {"mode": "in_place"})
    body = {"model_path": str(served.other), "weight_version": "v1"}
    assert (await post(http, "/update_weights_from_disk", body))[0] == 200


async def test_version_when_renamed_then_requests_abort_unless_told_otherwise(http):
    stream, seen = await first_token(http, {"input_ids": [5], "sampling_params": LONG})
    status, answer = await post(
        http, "/update_weight_version", {"new_version": "v3", "abort_all_requests": False}
    )
    assert (status, answer["new_version"]) == (200, "v3")
    assert (await post(http, "/update_weight_version", {"new_version": "v4"}))[1] == {
        "success": True,
        "message": "Weight version updated to v4",
        "new_version": "v4",
    }
    seen += [event async for event in stream]
    meta = seen[-2]["meta_info"]
    assert meta["finish_reason"]["type"] == "abort"
    assert [s["version"] for s in meta["weight_versions"]] == ["default", "v3"]


async def test_info_when_read_then_has_what_clients_need(http, served):
    assert (await get(http, "/health_generate"))[0] == 200
    for path in ("/model_info", "/get_model_info"):
        status, info = await get(http, path)
        assert status == 200
        assert info["model_path"] == str(served.folder)
        assert info["architectures"] == ["Qwen2ForCausalLM"]
    _, server = await get(http, "/server_info")
    assert server["status"] == "ready"
    assert server["max_req_input_len"] == 8186
    assert server["boot_id"]
    _, loads = await get(http, "/v1/loads")
    assert loads["loads"][0]["num_running_reqs"] == 0


async def test_metrics_when_requests_ran_then_counters_grow(http):
    before = await metrics(http)
    await generate(http, [5, 6, 7], 50, params={"ignore_eos": True})
    await post(http, "/pause_generation", {"mode": "in_place"})
    await post(http, "/continue_generation", {})
    after = await metrics(http)
    grown = {name: after[name] - before[name] for name in after}
    assert grown["sglang:prompt_tokens_total"] == 3
    assert grown["sglang:generation_tokens_total"] == 50
    assert grown["sglang:num_requests_total"] == 1
    assert grown["sglang:e2e_request_latency_seconds_count"] == 1
    assert 0 < grown["areal_inference_busy_seconds_total"] < 10
    assert grown["areal_inference_pause_seconds_total"] > 0
    for name in ("num_running_reqs", "num_queue_reqs", "token_usage", "gen_throughput"):
        assert f"sglang:{name}" in after
