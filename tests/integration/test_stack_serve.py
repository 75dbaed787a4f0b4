"""A stack without trainer, used by a client that has none of our code."""

from __future__ import annotations

import json
import re
import struct
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pool, message_factory
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)
from tests.integration.stack_tools import RunningStack, areal, eventually, running_stack

pytestmark = pytest.mark.timeout(240)

ROOT = Path(__file__).resolve().parents[2]
TASKS = 100


@pytest.fixture(scope="module")
def stack(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    folder = tmp_path_factory.mktemp("serve")
    overrides = (
        f"model.path={tiny_model}",
        "model.context_length=128",
        "allocation_mode=sglang:d2+fsdp:d1",
        "gconfig.max_new_tokens=8",
    )
    with running_stack(folder, "serve", *overrides) as running:
        yield running


class Bearer(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    """Sends the token that `areal token` prints."""

    def __init__(self, token: str) -> None:
        self.metadata = (("authorization", f"Bearer {token}"),)

    def intercept_unary_unary(self, proceed: Any, details: Any, request: Any) -> Any:
        return proceed(details._replace(metadata=self.metadata), request)

    intercept_unary_stream = intercept_unary_unary
    intercept_stream_stream = intercept_unary_unary


class ReflectionClient:
    """Knows a server only by what it says of itself."""

    def __init__(self, address: str, token: str) -> None:
        self.channel = grpc.intercept_channel(grpc.insecure_channel(address), Bearer(token))
        self.pool = descriptor_pool.DescriptorPool(ProtoReflectionDescriptorDatabase(self.channel))
        self.service = self.pool.FindServiceByName("areal.v1.RolloutService")

    def message(self, name: str) -> Any:
        return message_factory.GetMessageClass(self.pool.FindMessageTypeByName(f"areal.v1.{name}"))

    def call(self, method: str, request: Any, timeout: float = 60.0) -> Any:
        """A unary call's response, or a list of a stream's."""
        found = self.service.FindMethodByName(method)
        response = message_factory.GetMessageClass(found.output_type)
        kind = self.channel.unary_stream if found.server_streaming else self.channel.unary_unary
        invoke = kind(
            f"/areal.v1.RolloutService/{method}",
            request_serializer=lambda m: m.SerializeToString(),
            response_deserializer=response.FromString,
        )
        result = invoke(request, timeout=timeout)
        return list(result) if found.server_streaming else result


@pytest.fixture
def client(stack: RunningStack, tmp_path: Path) -> Iterator[ReflectionClient]:
    token = areal("token", "--run", str(stack.run_dir), cwd=tmp_path).stdout.strip()
    client = ReflectionClient(stack.address("rollout-0"), token)
    yield client
    client.channel.close()


def submit(client: ReflectionClient, ids: list[str], **fields: Any) -> Any:
    request = client.message("SubmitTasksRequest")()
    for number, task_id in enumerate(ids):
        task = request.tasks.add()
        task.task_id = task_id
        task.purpose = (
            client.pool.FindEnumTypeByName("areal.v1.Purpose")
            .values_by_name["PURPOSE_SERVE"]
            .number
        )
        task.workflow.name = fields.get("workflow", "rlvr")
        task.workflow.kwargs_json = json.dumps(
            {"reward_fn": "math", "gconfig": {"n_samples": 2, "max_new_tokens": 8}}
        )
        task.data_json = json.dumps({"prompt": f"{number}+1=", "answer": str(number + 1)})
    return client.call("SubmitTasks", request)


def floats(tensor: Any) -> tuple[float, ...]:
    return struct.unpack(f"<{len(tensor.data) // 4}f", tensor.data)


def ints(tensor: Any) -> tuple[int, ...]:
    return struct.unpack(f"<{len(tensor.data) // 4}i", tensor.data)


def test_serve_when_a_plain_client_submits_100_tasks_then_all_are_delivered_with_rewards(
    client: ReflectionClient,
) -> None:
    ids = [f"plain-{i}" for i in range(TASKS)]
    accepted = submit(client, ids)
    assert all(result.accepted for result in accepted.results)
    request = client.message("WatchTasksRequest")(task_ids=ids, include_trajectories=True)
    records = [response.record for response in client.call("WatchTasks", request, timeout=120.0)]
    assert sorted(record.task.task_id for record in records) == sorted(ids)
    delivered = client.pool.FindEnumTypeByName("areal.v1.TaskState").values_by_name[
        "TASK_STATE_DELIVERED"
    ]
    for record in records:
        assert record.state == delivered.number, record.reason
        assert len(record.group.trajectories) == 2
        tensors = {t.name: t.tensor for t in record.group.tensors}
        start = 0
        for trajectory in record.group.trajectories:
            tokens = slice(start, start + trajectory.length)
            start += trajectory.length
            versions = ints(tensors["token_versions"])[tokens]
            rewards = floats(tensors["rewards"])[tokens]
            # Version 0 is the configured model; -1 marks the prompt.
            assert set(versions) == {-1, 0}
            assert sum(rewards) == pytest.approx(trajectory.reward)
            assert trajectory.reward in (0.0, 1.0)
            logprobs = floats(tensors["behavior_logprobs"])[tokens]
            assert all(p < 0 for p, v in zip(logprobs, versions, strict=True) if v == 0), (
                "each sampled token has its logprob"
            )


def test_serve_when_an_id_is_submitted_again_then_nothing_changes(
    client: ReflectionClient,
) -> None:
    submit(client, ["twice"])
    again = submit(client, ["twice"])
    assert [result.accepted for result in again.results] == [False]


def test_serve_when_workflow_is_unknown_then_invalid_argument_with_a_hint(
    client: ReflectionClient,
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        submit(client, ["unknown-workflow"], workflow="rlvrr")
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "did you mean 'rlvr'" in caught.value.details()


def test_submit_when_file_is_fine_then_waits_for_all(stack: RunningStack, tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    rows = [{"prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(10)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = areal("submit", str(file), "--wait", "--json", "--run", str(stack.run_dir), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert lines[0] == {"event": "submitted", "tasks": 10, "known_already": 0}
    assert [line["event"] for line in lines[1:-1]] == ["task"] * 10
    assert lines[-1]["counts"] == {"delivered": 10}


def test_submit_when_a_line_is_malformed_then_its_number_and_nothing_submitted(
    stack: RunningStack, tmp_path: Path
) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text('{"task_id": "not-in", "prompt": "1+1="}\n{"prompt": \n')
    before = accounting(stack, tmp_path)["submitted"]
    refused = areal("submit", str(file), "--run", str(stack.run_dir), cwd=tmp_path)
    assert refused.returncode == 2
    assert refused.stderr.startswith(f"areal: {file}:2: not JSON")
    assert len(refused.stderr.splitlines()) == 1
    assert accounting(stack, tmp_path)["submitted"] == before


def accounting(stack: RunningStack, cwd: Path) -> dict[str, int]:
    status = areal("status", "--json", "--run", str(stack.run_dir), cwd=cwd)
    assert status.returncode == 0, status.stderr
    result: dict[str, int] = json.loads(status.stdout)["accounting"]
    return result


def test_status_when_running_then_the_states_add_up_and_servers_serve(
    stack: RunningStack, tmp_path: Path
) -> None:
    status = areal("status", "--json", "--run", str(stack.run_dir), cwd=tmp_path)
    content = json.loads(status.stdout)
    counts = content["accounting"]
    assert counts["submitted"] == sum(v for k, v in counts.items() if k != "submitted")
    assert [server["state"] for server in content["servers"]] == ["serving", "serving"]
    assert content["problems"] == {}
    # With nothing to do the worker waits for a task, and the ledger knows that it does.
    assert set(content["waits"]) == {name for name, entry in processes(stack) if entry["metrics"]}
    starved = {wait["what"]: wait for wait in content["waits"]["rollout-0"]}["task"]
    assert (starved["on"], starved["detail"]) == ("a client that submits tasks", "queue")
    assert starved["seconds"] > 0
    plain = areal("status", "--run", str(stack.run_dir), cwd=tmp_path)
    assert "rollout-0" in plain.stdout
    assert "waits      rollout-0: task (queue) on a client that submits tasks for " in plain.stdout


def processes(stack: RunningStack) -> list[tuple[str, dict[str, Any]]]:
    return list(stack.content["processes"].items())


def test_metrics_when_scraped_then_the_page_has_each_and_every_service_its_oldest_wait(
    stack: RunningStack,
) -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    for name, entry in processes(stack):
        if not entry["metrics"]:
            continue
        url, headers = f"http://{entry['metrics']}/metrics", stack.security.headers()
        asked = urllib.request.Request(url, headers=headers)
        with urllib.request.urlopen(asked, timeout=60) as reply:
            text = reply.read().decode()
        service = re.sub(r"-\d+$", "", name).replace("-", "_")
        assert f"# TYPE areal_{service}_oldest_wait_seconds gauge" in text, name
        for exported in re.findall(r"^# TYPE (\S+) ", text, re.MULTILINE):
            if exported.startswith("process_") or exported.endswith("_created"):
                continue
            common = exported.replace(f"areal_{service}_", "areal_SERVICE_")
            assert re.search(rf"`({exported}|{common})[`{{]", page), exported


def test_logs_when_a_process_is_named_then_its_log(stack: RunningStack, tmp_path: Path) -> None:
    shown = areal("logs", "buffer", "--run", str(stack.run_dir), cwd=tmp_path)
    assert "serving" in shown.stdout
    unknown = areal("logs", "bufer", "--run", str(stack.run_dir), cwd=tmp_path)
    assert unknown.returncode == 2
    assert "NAME 'bufer': no such log; expected one of buffer" in unknown.stderr


def test_up_when_the_trial_runs_already_then_one_line_with_its_pid(
    stack: RunningStack, tiny_model: Path
) -> None:
    again = areal(
        *("up", "--detach", f"model.path={tiny_model}", "experiment_name=serve", "trial_name=t0"),
        cwd=stack.run_dir.parent.parent.parent,
    )
    assert again.returncode == 1
    assert f"is already running (pid {stack.content['launcher']['pid']})" in again.stderr
    assert stack.state() == "ready"


def test_dead_letters_when_a_reward_raises_then_listed_with_cause_and_retried(
    stack: RunningStack, tmp_path: Path
) -> None:
    recipe = tmp_path / "recipe.py"
    recipe.write_text(
        "from areal import RLVRWorkflow\n"
        "def reward_fn(prompt, completions, prompt_ids, completion_ids, **data):\n"
        "    raise ValueError('no answer in this row')\n"
        "class Raising(RLVRWorkflow):\n"
        "    def __init__(self):\n"
        "        super().__init__(reward_fn)\n"
        "def main(argv): pass\n"
    )
    file = tmp_path / "tasks.jsonl"
    file.write_text('{"task_id": "poison", "prompt": "1+1="}\n')
    run = ("--run", str(stack.run_dir))
    done = areal(
        *("submit", str(file), "--recipe", str(recipe), "--workflow", "Raising", "--wait", *run),
        cwd=tmp_path,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "poison: dead_lettered" in done.stdout
    listed = areal("dead-letters", "list", "--json", *run, cwd=tmp_path)
    letter = json.loads(listed.stdout.splitlines()[0])
    assert letter["task_id"] == "poison"
    assert "no answer in this row" in letter["cause"] + letter["traceback"]
    plain = areal("dead-letters", "list", *run, cwd=tmp_path).stdout.splitlines()
    assert plain[0].startswith("poison   workflow_error, ")
    assert "no answer in this row" in plain[1]
    assert any('recipe.py", line 3, in reward_fn' in line for line in plain[2:]), plain
    # The library's class with the recipe's reward: not scored by a built-in unasked.
    file.write_text('{"task_id": "library", "prompt": "1+1="}\n')
    done = areal(
        *("submit", str(file), "--recipe", str(recipe), "--workflow", "RLVRWorkflow", "--wait"),
        *run,
        cwd=tmp_path,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "no answer in this row" in done.stdout
    areal("dead-letters", "drop", "library", *run, cwd=tmp_path)
    retried = areal("dead-letters", "retry", "poison", *run, cwd=tmp_path)
    assert retried.stdout == "1 tasks queued again\n"

    def listed_again() -> bool:
        return "poison" in areal("dead-letters", "list", *run, cwd=tmp_path).stdout

    eventually(listed_again, "it has failed as often again", 60)
    before = accounting(stack, tmp_path)["dead_lettered"]
    dropped = areal("dead-letters", "drop", "poison", "ghost", "--json", *run, cwd=tmp_path)
    assert json.loads(dropped.stdout) == {"event": "dropped", "tasks": 1, "not_on_the_list": 1}
    assert dropped.returncode == 1
    assert areal("dead-letters", "list", *run, cwd=tmp_path).stdout == "no dead letters\n"
    assert accounting(stack, tmp_path)["dead_lettered"] == before
