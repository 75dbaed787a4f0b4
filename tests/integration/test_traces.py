"""One trajectory's trace through real services and a real collector: whole, whatever happens."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import aiohttp
import pytest
from tests.otlp_receiver import Receiver, Span, start_receiver
from tests.ports import free_port
from tests.rollout_stack import Process, Stack, start_stack

from areal.clients.rollout import RolloutClient
from areal.clients.weight_sync import WeightSyncClient
from areal.config.experiment import save_config
from areal.types import TaskState

pytestmark = pytest.mark.timeout(240)

ROOT = Path(__file__).parents[2]
RECIPE = '''
import asyncio
import json
import time
from pathlib import Path

from areal import (
    FSDPPPOActor, GRPOConfig, GenerationHyperparameters, LLMRequest, RemoteSGLangEngine,
    RolloutWorkflow, StatefulLoader, WeightUpdateMeta, load_expr_config, make_trajectory,
)


def reward_fn(completions, **data):
    return 1.0


class Answer(RolloutWorkflow):
    """One answer of exactly so many tokens."""

    async def arun_episode(self, engine, data):
        n = data["tokens"]
        while not Path(data["gate"]).exists():
            await asyncio.sleep(0.02)
        gconfig = GenerationHyperparameters(max_new_tokens=n, min_new_tokens=n)
        response = await engine.agenerate(LLMRequest(engine.tokenizer.encode("1+1="), gconfig))
        [reward] = await engine.score(reward_fn, completions=["x"], data=data)
        return make_trajectory(response, reward)


def main(argv):
    config, _ = load_expr_config(argv, GRPOConfig)
    rollout, actor = RemoteSGLangEngine(config.rollout), FSDPPPOActor(config.actor)
    root = Path(config.run_root)
    rows = [(40, "."), (1900, "trained"), (1900, "trained"), (40, "never")]
    rows = [{"tokens": n, "gate": str(root / gate)} for n, gate in rows]
    rows = StatefulLoader(rows, shuffle=False)
    for step in range(actor.get_version(), config.total_train_steps):
        batch = rollout.prepare_batch(rows, Answer())
        seen = {"versions": batch["token_versions"].tolist(), "mask": batch["loss_mask"].tolist()}
        (root / f"step{step + 1}.json").write_text(json.dumps(seen))
        actor.compute_advantages(batch)
        actor.ppo_update(batch)
        (root / "trained").touch()
        while not (root / "publish").exists():
            time.sleep(0.02)
        actor.upload_weights(WeightUpdateMeta())
'''

LIFE = ["submit", "wait_lease", "lease", "report", "wait_take", "take", "train", "publish"]
GAP_S = 1.0
"""Between two spans of one process there is a turn of its event loop, on a busy machine."""


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    with start_receiver() as started:
        yield started


@pytest.fixture(scope="module")
def stack(receiver: Receiver, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Two inference servers and all services but the trainer, sending their spans at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.grpc_endpoint)
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        folder = tmp_path_factory.mktemp("traces")
        with start_stack(folder, max_head_offpolicyness=2) as whole:
            config = whole.config
            config.recipe = str(folder / "recipe.py")
            Path(config.recipe).write_text(RECIPE)
            config.total_train_steps = 3
            config.train_dataset.batch_size = 1
            config.gconfig.n_samples = 1
            config.actor.reward_norm = config.actor.adv_norm = None
            save_config(config, whole.config_file)
            whole.service("rollout", config.endpoints.rollout)
            whole.wait("rollout", config.endpoints.rollout)
            yield whole


def of_task(spans: Sequence[Span], task_id: str) -> list[Span]:
    """The spans of a task's trace, in their order."""
    [first] = [s for s in spans if s.name == "submit" and s.attributes["areal.task_id"] == task_id]
    return sorted((s for s in spans if s.trace_id == first.trace_id), key=lambda s: s.start)


def longest_gap(spans: Sequence[Span], start: float, end: float) -> float:
    """Seconds in which nothing of the trace was under way."""
    longest, covered = 0.0, start
    for span in sorted(spans, key=lambda s: s.start):
        longest = max(longest, span.start - covered)
        covered = max(covered, span.end)
    return max(longest, end - covered)


def assert_whole(trace: Sequence[Span], outside: str = "") -> None:
    """One trace id, and every parent is there; but spans of a killed process are lost."""
    known = {span.span_id for span in trace} | {outside}
    assert len({span.trace_id for span in trace}) == 1
    orphans = [span for span in trace if span.parent_id and span.parent_id not in known]
    assert not orphans, "\n".join(map(str, trace))


def versions_of(segments: Sequence[Span]) -> list[int]:
    """The policy version of every token, as the segments tell it."""
    return [
        version
        for segment in segments
        for version, count in zip(
            segment.attributes["areal.token_versions"],
            segment.attributes["areal.token_version_counts"],
            strict=True,
        )
        for _ in range(count)
    ]


def assert_documented(spans: Sequence[Span]) -> None:
    """Every span and attribute is in docs/tracing.md; RPCs have the names of their methods."""
    known = set(re.findall(r"`([^`\n]+)`", (ROOT / "docs" / "tracing.md").read_text()))
    names = {span.name for span in spans if not span.name.startswith("areal.v1.")}
    assert names - known == set()
    assert {key for span in spans for key in span.attributes} - known == set()


def named(trace: Sequence[Span], name: str) -> list[Span]:
    return [span for span in trace if span.name == name]


async def test_trace_when_updated_in_flight_and_a_server_dies_then_it_has_no_gap(
    stack: Stack, receiver: Receiver
) -> None:
    """Rows 1 and 2 begin when row 0 is trained; under way, they see its update and a death.

    The servers stand still from the middle of these answers until both are done with the update
    and one of them is dead: however fast a machine generates, no answer ends before. Row 3 never
    ends, so what is trained is rows 0 to 2: one of these two was on the server that died.
    """
    config = stack.config
    trainer = Process(
        stack.folder / "trainer.log", "areal_trainer", "--config", str(stack.config_file)
    )
    stack.processes["trainer"] = trainer
    weight_sync = WeightSyncClient(config.endpoints.weight_sync)
    try:
        for index, url in enumerate(config.endpoints.inference):
            await asyncio.to_thread(stack.generating, 150, index)
            await _post(f"{url}/pause_generation", {"mode": "in_place"})
        await asyncio.to_thread(Path(config.run_root, "publish").touch)
        await weight_sync.wait_for("both", lambda s: s.confirmed_version == 1, timeout=60)
        await _post(f"{config.endpoints.inference[0]}/continue_generation", {})
        await asyncio.to_thread(stack.generating, 200, 0)
        stack.processes["inference-0"].kill()
        await _post(f"{config.endpoints.inference[1]}/continue_generation", {})
        assert await asyncio.to_thread(trainer.wait, 120) == 0, trainer.log[-3000:]
    finally:
        await weight_sync.close()
        del stack.processes["trainer"]
        trainer.end()
        stack.end("inference-0")
        stack.inference("inference-0", config.endpoints.inference[0])
    spans = receiver.wait(
        lambda spans: sum(s.name == "publish" for s in spans) == 6, "3 steps of 1 group"
    )
    trained = {step: _trained(stack, step) for step in (1, 2, 3)}
    traces = {
        int(s.attributes["areal.step"]): of_task(spans, s.attributes["areal.task_id"])
        for s in spans
        if s.name == "take" and "areal.task_id" in s.attributes
    }
    assert sorted(traces) == [1, 2, 3]
    moved = []
    for step, trace in traces.items():
        assert_whole(trace)
        assert [s.name for s in trace if s.name in LIFE] == LIFE, "\n".join(map(str, trace))
        processes = {"areal-trainer", "areal-rollout", "areal-reward", "areal-inference"}
        assert {s.service for s in trace} >= processes
        assert longest_gap(trace, trace[0].start, named(trace, "publish")[0].end) < GAP_S
        [generate], segments = named(trace, "generate"), named(trace, "segment")
        [lease] = named(trace, "lease")
        assert generate.parent_id == lease.span_id
        assert lease.attributes["areal.outcome"] == "completed"
        assert {s.parent_id for s in segments} == {generate.span_id}
        below = [*segments, *named(trace, "wait_server")]
        assert longest_gap(below, generate.start, generate.end) < GAP_S
        assert versions_of(segments) == trained[step]
        assert generate.attributes["gen_ai.usage.output_tokens"] == len(trained[step])
        ports = {segment.attributes["server.port"] for segment in segments}
        if len(set(trained[step])) > 1 and len(ports) > 1:
            moved.append((trace, segments))
        [score] = named(trace, "score")
        assert named(trace, "areal.v1.RewardService/Score")[0].parent_id == score.span_id
        # What the trainer does is told in the step's own trace, too.
        [publish] = named(trace, "publish")
        [of_step] = [s for s in spans if s.span_id in publish.links]
        assert (of_step.name, of_step.trace_id == publish.trace_id) == ("publish", False)
        assert publish.attributes["areal.policy_version"] == step
    assert_documented(spans)
    assert moved, "no trajectory was both updated in flight and moved to another server"
    for _, segments in moved:
        assert "error.type" in segments[0].attributes
        assert segments[-1].attributes["gen_ai.response.finish_reasons"] == ["length"]


async def _post(url: str, body: dict[str, str]) -> None:
    async with aiohttp.ClientSession() as http, http.post(url, json=body) as reply:
        reply.raise_for_status()


def _trained(stack: Stack, step: int) -> list[int]:
    seen = json.loads(Path(f"{stack.config.run_root}/step{step}.json").read_text())
    return [v for v, sampled in zip(seen["versions"], seen["mask"], strict=True) if sampled]


@pytest.mark.long
async def test_trace_when_its_worker_leaves_then_a_second_lease_goes_on_in_it(
    stack: Stack, receiver: Receiver, tmp_path: Path
) -> None:
    """A REST client's own trace goes through gateway, ledger, and two workers."""
    address = f"127.0.0.1:{free_port()}"
    stack.service("gateway", address)
    trace_id, span_id = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    kwargs = {"reward_fn": "math", "gconfig": {"max_new_tokens": 900, "min_new_tokens": 900}}
    body = {
        "tasks": [
            {
                "task_id": "rest",
                "workflow": {"kwargs": kwargs},
                "data": {"prompt": "1+1=", "answer": "2"},
            }
        ]
    }
    await _answers(f"http://{address}/healthz")
    headers = {"traceparent": f"00-{trace_id}-{span_id}-01"}
    async with (
        aiohttp.ClientSession(headers=headers) as http,
        http.post(f"http://{address}/v1/tasks", json=body) as reply,
    ):
        assert await reply.json() == {"results": [{"task_id": "rest", "accepted": True}]}
    stack.end("gateway")
    await _generating(stack, 200)
    stack.end("rollout")
    second = f"127.0.0.1:{free_port()}"
    stack.service("rollout", second)
    stack.wait("rollout", second)
    client = RolloutClient(second)
    [record] = [r async for r in client.watch_tasks(["rest"], include_trajectories=True)]
    await client.close()
    assert record.state is TaskState.DELIVERED

    spans = receiver.wait(
        lambda spans: len([s for s in named(spans, "lease") if s.trace_id == trace_id]) == 2,
        "the second lease",
    )
    trace = of_task(spans, "rest")
    assert_whole(trace, outside=span_id)
    assert {span.trace_id for span in trace} == {trace_id}
    [request] = named(trace, "POST /v1/tasks")
    assert (request.service, request.parent_id) == ("areal-gateway", span_id)
    [submit] = named(trace, "submit")
    first, again = named(trace, "lease")
    assert first.parent_id == again.parent_id == submit.span_id
    assert (first.attributes["areal.outcome"], again.attributes["areal.outcome"]) == (
        "drain",
        "completed",
    )
    assert (first.attributes["areal.resumed"], again.attributes["areal.resumed"]) == (False, True)
    waits = named(trace, "wait_lease")
    assert waits[1].start > first.start + 0.1, "it waits since it was returned, not since ever"
    assert longest_gap(trace, request.start, again.end) < GAP_S
    segments = named(trace, "segment")
    assert len(segments) >= 2
    [trajectory] = record.group.trajectories
    sampled = trajectory.token_versions[trajectory.loss_mask].tolist()
    assert versions_of(segments) == sampled
    assert named(trace, "generate")[1].attributes["areal.resumed_tokens"] > 100
    assert_documented(spans)


async def _answers(url: str) -> None:
    async with asyncio.timeout(60), aiohttp.ClientSession() as http:
        while True:
            try:
                async with http.get(url) as reply:
                    if reply.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.05)


async def _generating(stack: Stack, tokens: int) -> None:
    """Until the request has so many tokens, wherever it runs."""
    deadline = time.monotonic() + 60
    async with aiohttp.ClientSession() as http:
        while True:
            used = 0
            for url in stack.config.endpoints.inference:
                try:
                    async with http.get(f"{url}/v1/loads") as answer:
                        loads = (await answer.json())["loads"]
                        used += sum(load["num_used_tokens"] for load in loads)
                except (aiohttp.ClientError, KeyError):  # it starts
                    continue
            if used >= tokens:
                return
            assert time.monotonic() < deadline, f"{used} tokens, not {tokens}"
            await asyncio.sleep(0.02)
