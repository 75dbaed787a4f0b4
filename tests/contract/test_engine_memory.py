"""Memory that a server releases while a trainer has its GPU: SGLang's two routes, on our engine.

SGLang itself does it only with --enable-memory-saver, which needs a GPU.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import psutil
import pytest
import torch
from tests.contract.engines import Http, output_logprobs
from tests.contract.test_engine_control import (
    LONG,
    PROMPT,
    TOLERANCE,
    finish,
    generating,
    recomputed,
    spans,
)

from areal.weights.manifest import build_manifest
from areal_weight_sync.engine.base import EngineError
from areal_weight_sync.engine.http import HttpEngine, open_session

TAGS = {"tags": ["kv_cache", "weights"]}


@pytest.fixture(autouse=True)
def only_ours(http: Http) -> None:
    if http.engine.real:
        pytest.skip("SGLang needs --enable-memory-saver, and that a GPU")


async def wake(http: Http, version: int = 0) -> None:
    assert await http.ok("/resume_memory_occupation", TAGS) is None
    await http.update(version)
    await http.resume()


async def test_release_when_requests_were_aborted_then_new_ones_wait_until_weights_are_back(
    http: Http,
):
    async with generating(http) as tasks:
        await http.pause("abort")
        answers = await asyncio.gather(*tasks)
        assert [finish(answer) for answer in answers] == ["abort"] * 3
        assert all(answer["output_ids"] for answer in answers)
        assert await http.ok("/release_memory_occupation", TAGS) is None
    late = asyncio.create_task(http.generate(PROMPT, **LONG, max_new_tokens=8))
    await http.until(lambda load: load["num_waiting_reqs"] == 1)
    assert (await http.get("/health"))[0] == 200, "a sleeping server is not a hung one"
    assert (await http.get("/ready"))[0] == 503
    assert await http.version() == "0"
    await http.ok("/resume_memory_occupation", TAGS)
    await http.update(1)
    assert not late.done()
    await http.resume()
    answer = await late
    assert spans(answer) == [("1", 0, 8)]


async def test_release_when_requests_run_then_refused_and_nothing_changes(http: Http):
    async with generating(http) as tasks:
        status, body = await http.post("/release_memory_occupation", TAGS)
        assert status == 400
        assert "3 requests are running: expected /pause_generation" in body["error"]["message"]
        await http.pause("in_place")
        assert (await http.post("/release_memory_occupation", TAGS))[0] == 400
        await http.resume()
        answers = await asyncio.gather(*tasks)
    assert [finish(answer) for answer in answers] == ["length"] * 3


async def test_release_when_requests_were_retracted_then_they_end_in_full_at_the_new_version(
    http: Http,
):
    async with generating(http) as tasks:
        await http.pause("retract")
        await http.ok("/release_memory_occupation", TAGS)
        await wake(http, 2)
        answers = await asyncio.gather(*tasks)
    for answer in answers:
        assert [version for version, _, _ in spans(answer)] == ["0", "2"]
        assert len(answer["output_ids"]) == http.engine.long


async def test_server_when_asleep_then_what_needs_its_memory_is_refused_in_one_line(http: Http):
    await http.pause("abort")
    await http.ok("/release_memory_occupation", TAGS)
    folder = str(http.engine.folders[1])
    for path, body in (
        ("/continue_generation", {}),
        ("/update_weights_from_disk", {"model_path": folder}),
        ("/stage_weights", {"model_path": folder}),
        ("/weights_checker", {"action": "checksum"}),
    ):
        status, answer = await http.post(path, body)
        assert status == 400, path
        assert "released" in str(answer), path
    await http.ok("/resume_memory_occupation", TAGS)
    status, answer = await http.post("/continue_generation", {})
    assert status == 400
    assert "expected /update_weights_from_disk first" in answer["error"]["message"]
    await http.update(0)
    await http.resume()
    assert finish(await http.generate(PROMPT, **LONG, max_new_tokens=4)) == "length"


async def test_memory_when_both_are_told_twice_or_without_need_then_harmless(http: Http):
    await http.ok("/resume_memory_occupation", {})
    await http.pause("abort")
    await http.ok("/release_memory_occupation", {})
    await http.ok("/release_memory_occupation", {"tags": ["weights"]})
    await http.ok("/resume_memory_occupation", {})
    await http.ok("/resume_memory_occupation", {"tags": []})
    await http.update(0)
    await http.resume()
    assert finish(await http.generate(PROMPT, **LONG, max_new_tokens=4)) == "length"


async def test_cache_when_only_it_is_released_then_the_weights_stay(http: Http):
    before = await http.ok("/weights_checker", {"action": "checksum"})
    await http.pause("abort")
    await http.ok("/release_memory_occupation", {"tags": ["kv_cache"]})
    assert (await http.post("/continue_generation", {}))[0] == 400
    await http.ok("/resume_memory_occupation", {"tags": ["kv_cache"]})
    await http.resume()
    assert finish(await http.generate(PROMPT, **LONG, max_new_tokens=4)) == "length"
    after = await http.ok("/weights_checker", {"action": "checksum"})
    assert before["per_engine_checksum"] == after["per_engine_checksum"]


async def test_memory_when_it_is_released_then_server_info_says_so(http: Http):
    process = psutil.Process(http.engine.pid)
    async with generating(http, 8) as tasks:
        await http.pause("abort")
        await asyncio.gather(*tasks)
    await http.ok("/weights_checker", {"action": "checksum"})
    await http.ok("/release_memory_occupation", TAGS)
    [state] = (await http.get("/server_info"))[1]["internal_states"]
    assert state["released"] == ["kv_cache", "weights"]
    assert process.is_running()
    await wake(http)
    assert finish(await http.generate(PROMPT, **LONG, max_new_tokens=4)) == "length"


async def test_weight_sync_when_it_puts_a_server_to_sleep_then_the_server_says_so_and_wakes(
    http: Http,
):
    folder = http.engine.folders[1]
    version = replace(build_manifest(folder, 1, 1), path=str(folder))
    async with open_session({}) as session, generating(http) as tasks:
        engine = HttpEngine(http.engine.url, session)
        await engine.sleep("asleep after 0")
        answers = await asyncio.gather(*tasks)
        assert await engine.weight_version() == "asleep after 0"
        [state] = (await http.get("/server_info"))[1]["internal_states"]
        assert state["released"] == ["kv_cache", "weights"]
        await engine.wake("unloaded")
        assert await engine.weight_version() == "unloaded"
        with pytest.raises(EngineError, match="expected /update_weights_from_disk first"):
            await engine.resume()
        await engine.load(version, flush_cache=False, timeout=30.0)
        await engine.resume()
        assert await engine.weight_version() == "1"
    for answer in answers:
        assert finish(answer) == "abort"
        assert {name for name, _, _ in spans(answer)} == {"0"}, "no token has the mark as version"
    after = await http.generate(PROMPT, **LONG, max_new_tokens=8)
    torch.testing.assert_close(
        output_logprobs(after), recomputed(http, after), atol=TOLERANCE, rtol=0
    )


@pytest.mark.parametrize("body", [{"tags": ["everything"]}, {"tags": "weights"}, {"tags": [1]}])
@pytest.mark.parametrize("path", ["/release_memory_occupation", "/resume_memory_occupation"])
async def test_tags_when_unknown_then_400(http: Http, path: str, body):
    status, answer = await http.post(path, body)
    assert status == 400
    assert "tags" in str(answer)
    assert psutil.Process(http.engine.pid).is_running()
