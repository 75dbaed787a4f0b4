"""The rollout service between real services: tasks in, trajectories out, whatever happens."""

import asyncio
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tests.buffer_client import BufferClient
from tests.integration.stack_tools import eventually
from tests.rollout_stack import free_port, start_stack

from areal.clients.rollout import RolloutClient
from areal.clients.weight_sync import WeightSyncClient
from areal.errors import InvalidInput, NotFound
from areal.recipe import load_recipe
from areal.tokenizer import Tokenizer
from areal.types import (
    GenerationHyperparameters,
    Purpose,
    StopReason,
    Task,
    TaskState,
    WorkflowSpec,
)
from areal.weights.manifest import (
    build_manifest,
    publish_dir,
    read_manifest,
    staging_dir,
    version_dir,
    write_manifest,
)
from areal.workflows.specs import describe_workflow

RECIPE = b'''
import asyncio
from areal.types import GenerationHyperparameters, LLMRequest
from areal.workflows.base import RolloutWorkflow, make_trajectory


def even_length(prompt, completions, prompt_ids, completion_ids, bonus=0.0, **data):
    """1 for an even number of tokens; `bonus` comes from the row."""
    return float(len(completion_ids) % 2 == 0) + bonus


def raises(completions, **data):
    raise KeyError("no such answer")


class TwoTurns(RolloutWorkflow):
    def __init__(self, reward_fn, gconfig: GenerationHyperparameters):
        self.reward_fn, self.gconfig = reward_fn, gconfig

    async def arun_episode(self, engine, data):
        if data.get("skip"):
            return None
        messages = [{"role": "user", "content": data["question"]}]
        ids = engine.tokenizer.apply_chat_template(messages)
        first = await engine.agenerate(LLMRequest(ids, self.gconfig))
        ids = [*first.input_tokens, *first.output_tokens, *engine.tokenizer.encode("again")]
        second = await engine.agenerate(LLMRequest(ids, self.gconfig))
        [reward] = await engine.score(
            self.reward_fn,
            completions=["x"],
            data=data,
            completion_ids=[second.output_tokens],
        )
        return make_trajectory([first, second], reward)
'''


@pytest.fixture(scope="module")
def stack(tmp_path_factory):
    with start_stack(tmp_path_factory.mktemp("stack"), lease_ttl_s=3.0) as whole:
        whole.service("rollout", whole.config.endpoints.rollout)
        whole.wait("rollout", whole.config.endpoints.rollout)
        servers = len(whole.config.endpoints.inference)
        eventually(
            lambda: whole.metric("rollout", "areal_rollout_serving_servers") == servers,
            "the rollout worker knows every server",
            30.0,
        )
        yield whole


@pytest.fixture
async def client(stack):
    client = RolloutClient(stack.config.endpoints.rollout)
    yield client
    await client.close()


@pytest.fixture
async def ledger(stack):
    client = BufferClient(stack.config.endpoints.buffer)
    yield client
    await client.close()


def rlvr(n=4, tokens=8, reward="math", **gconfig):
    kwargs = {
        "reward_fn": reward,
        "gconfig": {"n_samples": n, "max_new_tokens": tokens, **gconfig},
    }
    return WorkflowSpec("rlvr", "", json.dumps(kwargs))


def task(task_id, spec, data=None, **more):
    row = {"prompt": "1+1=", "answer": "2"} if data is None else data
    return Task(task_id, Purpose.SERVE, spec, row, **more)


async def finished(client, task_ids, timeout=60.0):
    return {
        record.task.task_id: record
        async for record in client.watch_tasks(task_ids, include_trajectories=True, timeout=timeout)
    }


async def test_tasks_when_submitted_then_all_end_with_true_logprobs(stack, client):
    import torch
    from transformers import AutoModelForCausalLM

    tasks = [
        task(f"many-{i}", rlvr(4, 6), {"prompt": f"{i}+{i}=", "answer": str(2 * i)})
        for i in range(100)
    ]
    assert await client.submit_tasks(tasks) == [True] * 100
    assert await client.submit_tasks(tasks[:3]) == [False] * 3
    records = await finished(client, [t.task_id for t in tasks])
    assert len(records) == 100
    assert {r.state for r in records.values()} == {TaskState.DELIVERED}

    tokenizer = Tokenizer.load(stack.config.tokenizer_dir)
    group = records["many-7"].group
    assert len(group.trajectories) == 4
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(stack.config.model.path).eval()
    for trajectory in group.trajectories:
        prompt = tokenizer.apply_chat_template([{"role": "user", "content": "7+7="}])
        ids, sampled = trajectory.input_ids.tolist(), trajectory.loss_mask
        assert ids[: len(prompt)] == prompt
        assert sampled.tolist() == [False] * len(prompt) + [True] * (len(ids) - len(prompt))
        assert set(trajectory.token_versions[sampled]) == {0}
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0].double()
        expected = torch.log_softmax(logits, -1)[
            torch.arange(len(ids) - 1), torch.tensor(ids[1:])
        ].numpy()
        np.testing.assert_allclose(
            trajectory.behavior_logprobs[sampled], expected[sampled[1:]], atol=1e-4
        )
        # When the last possible token is the end, SGLang says "length", and so do we.
        whole = int(sampled.sum()) < 6
        assert trajectory.finish_reason is (StopReason.STOP if whole else StopReason.LENGTH)
        assert ids[-1] in tokenizer.eos_token_ids or not whole
        text = tokenizer.decode(ids[len(prompt) :], skip_special_tokens=True)
        assert trajectory.completion_text == text
        assert trajectory.reward in {0.0, 1.0}


async def test_recipe_when_stored_then_its_workflow_and_reward_run(client, ledger):
    module = load_recipe(RECIPE, "two_turns.py")
    gconfig = GenerationHyperparameters(max_new_tokens=6)
    spec = describe_workflow(module.TwoTurns(module.even_length, gconfig))
    assert await ledger.put_recipe("two_turns.py", RECIPE) == spec.recipe_digest
    rows = [{"question": "a", "bonus": 0.5}, {"question": "b"}, {"question": "c", "skip": True}]
    await client.submit_tasks([task(f"two-{i}", spec, row) for i, row in enumerate(rows)])
    records = await finished(client, ["two-0", "two-1", "two-2"])
    assert records["two-2"].state is TaskState.REJECTED
    for index, bonus in ((0, 0.5), (1, 0.0)):
        [trajectory] = records[f"two-{index}"].group.trajectories
        turns = np.flatnonzero(np.diff(trajectory.loss_mask.astype(int)) == 1)
        assert len(turns) == 2
        second = len(trajectory.input_ids) - 1 - turns[1]
        assert trajectory.reward == float(second % 2 == 0) + bonus


async def test_recipe_when_its_reward_raises_then_dead_lettered_with_the_traceback(client, ledger):
    module = load_recipe(RECIPE, "two_turns.py")
    await ledger.put_recipe("two_turns.py", RECIPE)
    spec = describe_workflow(module.TwoTurns(module.raises, GenerationHyperparameters()))
    await client.submit_tasks([task("poison", spec, {"question": "a"}), task("fine", rlvr())])
    records = await finished(client, ["poison", "fine"])
    assert records["fine"].state is TaskState.DELIVERED
    assert records["poison"].state is TaskState.DEAD_LETTERED
    assert records["poison"].attempts == 3
    [letter] = [x for x in await ledger.list_dead_letters() if x.record.task.task_id == "poison"]
    assert letter.cause == "workflow_error"
    assert "no such answer" in letter.record.reason
    assert "two_turns.py" in letter.traceback


@pytest.mark.parametrize(
    ("spec", "row", "words"),
    [
        (WorkflowSpec("rlvrr"), None, ["'rlvrr'", "did you mean 'rlvr'?"]),
        (WorkflowSpec("X", "0" * 64), None, ["recipe_digest", "no such recipe"]),
        (rlvr(reward="maths"), None, ["'maths'", "did you mean 'math'?"]),
        (rlvr(n=0), None, ["n_samples 0"]),
        (WorkflowSpec("rlvr", "", "{"), None, ["kwargs_json", "not JSON"]),
        (rlvr(nsamples=3), None, ["'nsamples'", "did you mean 'n_samples'?"]),
    ],
)
async def test_submit_when_a_task_is_wrong_then_named_and_nothing_is_queued(
    client, spec, row, words
):
    good, bad = task("wrong-0", rlvr()), task("wrong-1", spec, row)
    with pytest.raises(InvalidInput) as caught:
        await client.submit_tasks([good, bad])
    message = str(caught.value)
    assert "\n" not in message
    for word in ["tasks[1] 'wrong-1'", *words]:
        assert word in message
    assert await client.get_tasks(["wrong-0"]) == []


async def test_submit_when_the_recipe_has_a_syntax_error_then_its_line(client, ledger):
    digest = await ledger.put_recipe("broken.py", b"x = 1\ndef f(:\n")
    with pytest.raises(InvalidInput, match=r"recipe broken\.py:2: "):
        await client.submit_tasks([task("syntax", WorkflowSpec("X", digest))])


async def test_prompt_when_longer_than_the_context_then_only_that_task_dies(client):
    await client.submit_tasks([task("long", rlvr(), {"prompt": "x" * 3000}), task("ok", rlvr())])
    records = await finished(client, ["long", "ok"])
    assert records["ok"].state is TaskState.DELIVERED
    assert records["long"].state is TaskState.DEAD_LETTERED
    assert "a prompt of 3002 tokens leaves no room in a context of 2048" in records["long"].reason


async def test_watch_when_a_task_is_unknown_then_not_found(client):
    with pytest.raises(NotFound, match="'nobody'"):
        await finished(client, ["nobody"])


async def test_cancel_when_it_runs_then_it_ends_cancelled_and_the_rest_goes_on(client):
    await client.submit_tasks([task("slow", rlvr(2, 1500, min_new_tokens=1500))])
    async with asyncio.timeout(60):
        while (await client.get_tasks(["slow"]))[0].state is not TaskState.RUNNING:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert await client.cancel_tasks(["slow"], reason="changed my mind") == 1
    [record] = [r async for r in client.watch_tasks(["slow"])]
    assert record.state is TaskState.CANCELLED
    assert record.reason == "changed my mind"


def _new_weights(config, version):
    """What a trainer does: the model plus a little noise, published as a folder."""
    weights = load_file(Path(config.model.path) / "model.safetensors")
    rng = np.random.default_rng(version)
    root = (config.run_dir / "weights").resolve()
    root.mkdir(parents=True, exist_ok=True)
    staging = staging_dir(root, version, 1)
    staging.mkdir()
    noisy = {k: (w + rng.normal(0, 1e-3, w.shape)).astype(w.dtype) for k, w in weights.items()}
    save_file(noisy, staging / "model.safetensors")
    shutil.copy(Path(config.model.path) / "config.json", staging)
    write_manifest(build_manifest(staging, version, 1), staging)
    publish_dir(staging, final := version_dir(root, version, 1))
    return read_manifest(final)


async def test_weights_when_updated_in_flight_then_tokens_carry_their_own_versions(stack, client):
    weight_sync = WeightSyncClient(stack.config.endpoints.weight_sync)
    await weight_sync.wait_for("two servers", lambda s: s.confirmed_servers == 2, timeout=60)
    ids = [f"update-{i}" for i in range(4)]
    await client.submit_tasks([task(i, rlvr(2, 700, min_new_tokens=700)) for i in ids])
    await asyncio.to_thread(stack.generating, 100, 0, 1)
    for version in (1, 2):
        await weight_sync.publish_version(_new_weights(stack.config, version))
        await weight_sync.wait_confirmed(version, timeout=30)
    await weight_sync.wait_for("both on 2", lambda s: s.confirmed_servers == 2, timeout=60)
    await client.submit_tasks([task("update-late", rlvr(2, 20, min_new_tokens=20))])
    records = await finished(client, [*ids, "update-late"])
    for name, record in records.items():
        assert record.state is TaskState.DELIVERED
        for trajectory in record.group.trajectories:
            versions = trajectory.token_versions[trajectory.loss_mask]
            assert (np.diff(versions) >= 0).all()
            assert set(versions) <= {0, 1, 2}
            assert name != "update-late" or set(versions) == {2}
            assert len(versions) == (20 if name == "update-late" else 700)
    crossed = [
        set(trajectory.token_versions[trajectory.loss_mask])
        for name in ids
        for trajectory in records[name].group.trajectories
    ]
    assert {0, 2} <= set.union(*crossed)
    assert any(len(versions) > 1 for versions in crossed)
    assert (await weight_sync.status()).aborted_requests == 0
    await weight_sync.close()


async def test_worker_when_told_to_leave_then_the_next_continues_its_tokens(stack, client):
    """SIGTERM in the middle of long generations: the tokens continue in another worker."""
    ids = [f"drain-{i}" for i in range(4)]
    spec = rlvr(2, 900, min_new_tokens=900)
    await client.submit_tasks([task(i, spec) for i in ids])
    await asyncio.to_thread(stack.generating, 300, 0, 1)
    first = stack.processes.pop("rollout")
    first.terminate()
    assert first.wait(60) == 0
    assert "drain_left_leases" not in first.log

    address = f"127.0.0.1:{free_port()}"
    stack.service("rollout", address, process="rollout")
    stack.wait("rollout", address)
    stack.config.endpoints.rollout = address
    again = RolloutClient(address)
    records = await finished(again, ids, timeout=90)
    await again.close()
    assert {r.state for r in records.values()} == {TaskState.DELIVERED}
    assert all(r.infrastructure_attempts == 0 and r.attempts == 0 for r in records.values())
    for record in records.values():
        for trajectory in record.group.trajectories:
            assert int(trajectory.loss_mask.sum()) == 900
    assert stack.metric("rollout", "areal_rollout_replayed_tokens_total") > 100


async def test_server_when_killed_then_its_requests_end_elsewhere(stack):
    """kill -9 of one of two servers in the middle of generations: nothing is lost."""
    client = RolloutClient(stack.config.endpoints.rollout)
    weight_sync = WeightSyncClient(stack.config.endpoints.weight_sync)
    ids = [f"kill-{i}" for i in range(8)]
    await client.submit_tasks([task(i, rlvr(2, 600, min_new_tokens=600)) for i in ids])
    await asyncio.to_thread(stack.generating, 200, 1)
    stack.processes["inference-1"].kill()
    records = await finished(client, ids, timeout=90)
    assert {r.state for r in records.values()} == {TaskState.DELIVERED}
    # The first failed request told weight-sync, which need not have looked by now.
    await weight_sync.wait_for("one server less", lambda s: s.confirmed_servers == 1, timeout=60)
    servers, _ = await weight_sync.list_servers()
    states = {s.url: s.state for s in servers}
    assert states[stack.config.endpoints.inference[1]] == "quarantined"
    stack.inference("inference-1", stack.config.endpoints.inference[1])
    await weight_sync.wait_for("two servers", lambda s: s.confirmed_servers == 2, timeout=60)
    await weight_sync.close()
    await client.close()


async def test_worker_when_killed_then_its_next_life_has_the_leases_back_at_once(tmp_path):
    """Not after their time to live, which is ten minutes here."""
    with start_stack(tmp_path, servers=1, lease_ttl_s=600.0) as stack:
        address = stack.config.endpoints.rollout
        stack.service("rollout", address)
        stack.wait("rollout", address)
        client = RolloutClient(address)
        ids = [f"again-{i}" for i in range(4)]
        await client.submit_tasks([task(i, rlvr(2, 700, min_new_tokens=700)) for i in ids])
        async with asyncio.timeout(60):
            while {r.state for r in await client.get_tasks(ids)} != {TaskState.RUNNING}:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        await client.close()
        stack.processes["rollout"].kill()
        stack.service("rollout", address)
        stack.wait("rollout", address)
        again = RolloutClient(address)
        records = await finished(again, ids, timeout=90)
        await again.close()
    assert {r.state for r in records.values()} == {TaskState.DELIVERED}
    assert [r.infrastructure_attempts for r in records.values()] == [1] * 4
