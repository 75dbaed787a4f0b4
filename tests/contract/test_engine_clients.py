"""The clients that production uses, against both engines: generation, and weight updates."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from tests.contract.engines import (
    CONTEXT,
    VOCABULARY,
    EngineUnderTest,
    Http,
    chosen,
    reference,
    running_engine,
)
from tests.unit.areal_weight_sync.weight_sync_fakes import FakeStore

from areal.types import GenerationHyperparameters, LLMRequest, LLMResponse, StopReason
from areal.weights.manifest import PolicyVersion, build_manifest
from areal.weights.servers import InferenceServer, ServerState
from areal_rollout.generation.client import Interrupted, SGLangClient
from areal_rollout.generation.protocol import ModelLimits
from areal_rollout.generation.server_table import ServerTable
from areal_weight_sync.config import WeightSyncConfig
from areal_weight_sync.coordinator import Coordinator
from areal_weight_sync.engine.base import EngineError
from areal_weight_sync.engine.http import HttpEngine, open_session

TOLERANCE = 1e-4
PROMPT = [5, 17, 99, 3, 42]
LIMITS = ModelLimits(vocab_size=VOCABULARY, context_length=CONTEXT)
"""No end-of-sequence token is sent; the engines know the model's, 1."""


class Observer:
    def __init__(self) -> None:
        self.kinds: list[str] = []

    def request_done(self, seconds: float, tokens: int) -> None:
        pass

    def interruption(self, kind: str) -> None:
        self.kinds.append(kind)

    def salvaged(self, tokens: int) -> None:
        pass


@contextlib.asynccontextmanager
async def client_of(http: Http, version: int = 0):
    """A generation client whose table lists the server; `failures` is what it would report."""
    failures: list[str] = []

    async def report(url: str, cause: str) -> None:
        failures.append(cause)

    client = SGLangClient(
        ServerTable(),
        LIMITS,
        report=report,
        observer=Observer(),
        request_timeout_s=100.0,
        setup_timeout_s=60.0,
    )
    await client.start()
    url = http.engine.url
    client.table.update([InferenceServer(url, url, ServerState.SERVING, version, "")])
    try:
        yield client, failures
    finally:
        await client.close()


async def generate(client: SGLangClient, request: LLMRequest, response: LLMResponse):
    """One answer."""
    await client.generate(request, [response])
    return response


@pytest.fixture(params=["alone", "group"])
def ask(request: pytest.FixtureRequest):
    """Starts generation for several answers, each by a call of its own or all by one."""
    alone = request.param == "alone"

    def start(
        client: SGLangClient,
        asked: LLMRequest,
        responses: list[LLMResponse],
        heard: Callable[[int, Sequence[int]], None] | None = None,
    ):
        """`heard` is called with an answer's place in `responses` and its tokens so far."""
        calls = [[each] for each in responses] if alone else [responses]
        tasks = []
        for first, call in enumerate(calls):
            told = heard and (lambda at, ids, first=first: heard(first + at, ids))
            request = dataclasses.replace(asked, on_tokens=told)
            tasks.append(asyncio.create_task(client.generate(request, call)))
        return tasks

    return start


def empty() -> LLMResponse:
    return LLMResponse(list(PROMPT), [], [], [], StopReason.ABORT)


def request(tokens: int, **params) -> LLMRequest:
    # Never ends early: the stop token is masked until the last token.
    params = {"min_new_tokens": tokens, **params}
    return LLMRequest(list(PROMPT), GenerationHyperparameters(max_new_tokens=tokens, **params))


def unstopped(logits: torch.Tensor) -> torch.Tensor:
    """With the masked stop token."""
    logits = logits.clone()
    logits[:, 1] = float("-inf")
    return logits


def check(http: Http, response: LLMResponse, tokens: int) -> None:
    """Every token has a version, and its logprob by that version over a fresh cache."""
    assert len(response.output_tokens) == len(response.output_versions) == tokens
    assert all(a <= b for a, b in pairwise(response.output_versions))
    for version in set(response.output_versions):
        at = [i for i, v in enumerate(response.output_versions) if v == version]
        logits = reference(http.engine.models[version], PROMPT, response.output_tokens)
        expected = chosen(unstopped(logits[at]), [response.output_tokens[i] for i in at])
        found = torch.tensor([response.output_logprobs[i] for i in at])
        torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)


# ------------------------------------------------------------------ generation


async def test_client_when_generating_then_all_that_we_promise(http: Http, ask):
    async with client_of(http) as (client, failures):
        responses = [empty() for _ in range(8)]
        await asyncio.gather(*ask(client, request(40), responses))
        assert len({tuple(response.output_tokens) for response in responses}) > 1
        for response in responses:
            assert response.stop_reason is StopReason.LENGTH
            assert response.interruptions == 0
            check(http, response, 40)
        greedy = GenerationHyperparameters(max_new_tokens=20, greedy=True, min_new_tokens=20)
        one = await generate(client, LLMRequest(list(PROMPT), greedy), empty())
        stop = one.output_tokens[5]
        stopping = GenerationHyperparameters(max_new_tokens=20, greedy=True, stop_token_ids=[stop])
        response = await generate(client, LLMRequest(list(PROMPT), stopping), empty())
        assert response.stop_reason is StopReason.STOP
        assert response.output_tokens[-1] in (stop, 1)
        assert failures == []


async def test_client_when_the_worker_drains_then_partials_go_on_in_the_next(http: Http, ask):
    long = http.engine.long
    async with client_of(http) as (client, _):
        partial = [empty() for _ in range(4)]
        tasks = ask(client, request(long), partial)
        await http.running(4)
        await http.advance(4)
        await client.interrupt(20.0)
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(outcome, Interrupted)
    assert all(0 < len(response.output_tokens) < long for response in partial)
    async with client_of(http) as (client, failures):
        await asyncio.gather(*ask(client, request(long), partial))
        for response in partial:
            check(http, response, long)
        assert failures == []


async def test_client_when_more_run_than_the_server_takes_then_the_waiting_end_empty(http: Http):
    """An abort reaches requests of which no token exists yet: no failure, just nothing."""
    async with client_of(http) as (client, failures):
        partial, long = [empty() for _ in range(24)], http.engine.long
        tasks = [asyncio.create_task(generate(client, request(long), each)) for each in partial]
        await http.until(lambda load: load["num_waiting_reqs"] == 8)
        await http.advance(16, 5)
        # Else those that wait would take the places of the first that are aborted.
        await http.pause("in_place")
        interrupting = asyncio.create_task(client.interrupt(20.0))
        # While paused, SGLang's loads continue counting those that it has released.
        left = set(tasks)
        async with asyncio.timeout(60):
            while len(left) > 16:
                _, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
        await http.resume()
        await interrupting
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} == {Interrupted}
        assert failures == []
    assert sum(not response.output_tokens for response in partial) == 8


async def test_client_when_cancelled_then_the_server_stops_working_on_it(http: Http, ask):
    async with client_of(http) as (client, _):
        tasks = ask(client, request(3000), [empty() for _ in range(3)])
        await http.running(3)
        for task in tasks:
            task.cancel()
        await http.until(lambda load: not load["num_running_reqs"])


@pytest.fixture
def victim(engine: EngineUnderTest, tmp_path: Path) -> Iterator[EngineUnderTest]:
    """A second server of the same kind, at version 0; the test kills it."""
    with running_engine(
        engine.name, engine.folders, engine.models, tmp_path / "victim.log"
    ) as running:
        yield running


async def test_client_when_a_server_is_killed_then_its_tokens_are_kept_and_another_goes_on(
    http: Http, victim: EngineUnderTest, ask
):
    """It dies by kill -9 while it streams; the other one continues at version 1."""
    await http.update(1)
    tokens = http.engine.long
    async with client_of(http) as (client, failures):
        dying, survivor = victim.url, http.engine.url
        client.table.update([InferenceServer(dying, dying, ServerState.SERVING, 0, "")])
        responses = [empty() for _ in range(4)]
        # Not what the server says of itself: SGLang samples ahead of the process that answers.
        arrived, enough = [0] * 4, asyncio.Event()

        def heard(number: int, ids: Sequence[int]) -> None:
            arrived[number] = len(ids)
            if min(arrived) >= tokens * 2 // 5:
                enough.set()

        tasks = ask(client, request(tokens), responses, heard)
        await enough.wait()
        client.table.update(
            [
                InferenceServer(dying, dying, ServerState.SERVING, 0, ""),
                InferenceServer(survivor, survivor, ServerState.SERVING, 1, ""),
            ]
        )
        os.kill(victim.pid, signal.SIGKILL)
        await asyncio.gather(*tasks)
        assert failures
        for response in responses:
            assert response.interruptions == 1
            assert response.output_versions.count(0) >= tokens // 4
            assert 1 in response.output_versions
            check(http, response, tokens)


# ------------------------------------------------------------------ weight-sync's engine


def version_of(http: Http, version: int) -> PolicyVersion:
    return build_manifest(http.engine.folders[version], version, 1)


@pytest.mark.parametrize("mode", ["in_place", "retract", "abort"])
async def test_http_engine_when_driven_through_an_update_then_confirms_it(http: Http, mode: str):
    async with open_session({}) as session:
        engine = HttpEngine(http.engine.url, session)
        boot = await engine.boot_id()
        assert await engine.weight_version() == "0"
        assert await engine.running() == 0
        before = await engine.fingerprint(10.0)
        await engine.pause(mode)
        await engine.load(version_of(http, 1), flush_cache=mode != "in_place", timeout=30.0)
        assert await engine.weight_version() == "1"
        after = await engine.fingerprint(10.0)
        await engine.resume()
        assert before is not None
        assert after is not None
        assert before.layout == after.layout
        assert before.digest != after.digest
        prompt = [3, 10, 17, 24]
        found = torch.tensor(await engine.logprobs(prompt, "1"))
        expected = chosen(reference(http.engine.models[1], prompt[:1], prompt[1:]), prompt[1:])
        torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)
        assert await engine.boot_id() == boot


async def test_http_engine_when_staged_then_swapped_in_under_running_requests(http: Http):
    """Ours only: SGLang knows no staging, and says so with a 404."""
    async with open_session({}) as session:
        engine = HttpEngine(http.engine.url, session)
        version = version_of(http, 1)
        staged = await engine.stage(version, timeout=30.0)
        if http.engine.real:
            assert staged is None
            return
        assert staged != await engine.fingerprint(10.0)
        params = {"max_new_tokens": http.engine.long, "ignore_eos": True}
        tasks = [asyncio.create_task(http.generate(PROMPT, **params)) for _ in range(3)]
        await http.running(3)
        await http.advance(3)
        await engine.load(version, flush_cache=False, timeout=60.0)
        assert not any(task.done() for task in tasks)
        assert staged == await engine.fingerprint(10.0)
        for answer in await asyncio.gather(*tasks):
            spans = answer["meta_info"]["weight_versions"]
            assert [span["version"] for span in spans] == ["0", "1"]
            assert len(answer["output_ids"]) == http.engine.long


async def test_http_engine_when_staged_files_are_replaced_then_the_new_ones_are_loaded(
    http: Http, tmp_path
):
    async with open_session({}) as session:
        engine = HttpEngine(http.engine.url, session)
        folder = tmp_path / "version"
        shutil.copytree(http.engine.folders[1], folder)
        before = await engine.stage(build_manifest(folder, 1, 1), timeout=30.0)
        shutil.rmtree(folder)
        shutil.copytree(http.engine.folders[2], folder)
        await engine.load(build_manifest(folder, 2, 1), flush_cache=True, timeout=30.0)
        after = await engine.fingerprint(10.0)
        assert after is not None
        assert after != before
        await engine.load(version_of(http, 2), flush_cache=True, timeout=30.0)
        assert await engine.fingerprint(10.0) == after


async def test_http_engine_when_the_folder_to_stage_is_missing_then_says_so(http: Http):
    if http.engine.real:
        pytest.skip("SGLang knows no staging")
    async with open_session({}) as session:
        engine = HttpEngine(http.engine.url, session)
        missing = PolicyVersion(version=9, incarnation=1, path="/nowhere")
        with pytest.raises(EngineError, match="nowhere"):
            await engine.stage(missing, timeout=30.0)


async def test_http_engine_when_the_folder_is_missing_then_says_so(http: Http):
    async with open_session({}) as session:
        engine = HttpEngine(http.engine.url, session)
        missing = PolicyVersion(version=9, incarnation=1, path="/nowhere")
        with pytest.raises(EngineError, match="nowhere"):
            await engine.load(missing, flush_cache=True, timeout=30.0)
        assert await engine.weight_version() == "0"


# ------------------------------------------------------------------ the coordinator


@contextlib.asynccontextmanager
async def coordinator_of(http: Http, table: ServerTable, interrupt: str):
    """A coordinator that brings the server along, and keeps a client's table up to date."""
    tasks: list[asyncio.Task[None]] = []

    def spawn(coroutine, name: str) -> asyncio.Task[None]:
        tasks.append(asyncio.create_task(coroutine, name=name))
        return tasks[-1]

    async with open_session({}) as session:
        coordinator = Coordinator(
            WeightSyncConfig(interrupt=interrupt, probe_interval_s=0.2, serving_grace_s=5.0),
            FakeStore(),
            lambda url: HttpEngine(url, session),
            spawn,
            spawn,
        )

        async def feed() -> None:
            changes = coordinator.open_feed()
            while True:
                await changes.take()
                table.update(coordinator.servers())

        spawn(feed(), "feed")
        try:
            yield coordinator
        finally:
            await coordinator.stop()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def confirmed(coordinator: Coordinator, version: int) -> None:
    feed = coordinator.open_feed()
    async with asyncio.timeout(60):
        while coordinator.status().confirmed_version < version:
            await feed.take()
    coordinator.close_feed(feed)


@pytest.mark.parametrize("interrupt", ["in_place", "retract", "abort"])
async def test_coordinator_when_versions_come_while_requests_run_then_none_is_lost(
    http: Http, interrupt: str
):
    long = http.engine.long
    async with client_of(http) as (client, failures):
        client.table.update([])
        async with coordinator_of(http, client.table, interrupt) as coordinator:
            coordinator.register("s", http.engine.url)
            await coordinator.publish(version_of(http, 0))
            await confirmed(coordinator, 0)
            tasks = [
                asyncio.create_task(generate(client, request(long), empty())) for _ in range(12)
            ]
            await http.running(12)
            for version in (1, 2, 3):
                await http.advance(12)
                await coordinator.publish(version_of(http, version))
                await confirmed(coordinator, version)
            responses = await asyncio.gather(*tasks)
            status = coordinator.status()
        assert failures == []
        (server,) = coordinator.servers()
        assert (server.state, server.version) == (ServerState.SERVING, 3)
        assert status.updates == 3
        assert (status.aborted_requests > 0) == (interrupt == "abort")
        for response in responses:
            assert response.stop_reason is StopReason.LENGTH
            assert (response.interruptions > 0) == (interrupt == "abort")
            assert set(response.output_versions) == {0, 1, 2, 3}
            if interrupt != "in_place":  # whose cache keeps older versions' entries
                check(http, response, long)
