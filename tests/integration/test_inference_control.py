"""SGLang's protocol around generation, against a real server process: abort, pause, new weights.

Only the protocol is used here (url and model folder): the same tests can drive SGLang itself.
"""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest
from tests.integration.inference_http import LONG, first_token, generate, get, metrics, post


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


@pytest.mark.parametrize("stream", [True, False])
async def test_client_when_gone_then_its_requests_are_aborted(http, served, stream: bool):
    before = await metrics(http)
    async with aiohttp.ClientSession(served.url) as leaving:
        body = {"input_ids": [5, 6], "sampling_params": {**LONG, "n": 20}, "stream": stream}
        request = asyncio.create_task(leaving.post("/generate", json=body))
        async with asyncio.timeout(60):
            while (await metrics(http))["sglang:num_running_reqs"] < 20:
                pass
        request.cancel()
        [answer] = await asyncio.gather(request, return_exceptions=True)
        if stream:  # it had begun
            answer.close()
    async with asyncio.timeout(60):
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
    waiting = asyncio.create_task(generate(http, [9], 2, params={**params, "max_new_tokens": 2}))
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
    assert 0 < grown["areal_inference_busy_seconds_total"] < 60
    assert grown["areal_inference_pause_seconds_total"] > 0
    for name in ("num_running_reqs", "num_queue_reqs", "token_usage", "gen_throughput"):
        assert f"sglang:{name}" in after
