"""Nonsense for every gRPC method and every HTTP endpoint, with all services running.

The short form is the same every time; `make fuzz` sends fifty times as much, at random.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import orjson
import pytest
from starlette.routing import Route
from tests.fuzz_stack import RLVR, ROW, FuzzedStack, fuzzed_stack
from tests.grpc_fuzz import (
    Words,
    channel_to,
    discover,
    fuzz_budget,  # noqa: F401 - a fixture
    fuzz_method,
    send_padded,
    send_too_large,
)
from tests.http_fuzz import METHODS, fuzz_openapi, fuzz_route, fuzz_socket

from areal.protocol.trajectories import pack_group, task_to_pb
from areal.security import Security
from areal.types import Purpose, Task, Trajectory, TrajectoryGroup, WorkflowSpec
from areal.v1 import (
    buffer_service_pb2,
    policy_pb2,
    reward_service_pb2,
    rollout_service_pb2,
    sandbox_service_pb2,
    weight_sync_service_pb2,
)
from areal_inference.http_api.app import build_app

pytestmark = [pytest.mark.timeout(3600), pytest.mark.usefixtures("fuzz_budget")]

# Lists of requests per method, eight requests each at most.
SHORT = 6


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FuzzedStack]:
    with fuzzed_stack(tmp_path_factory.mktemp("fuzz")) as running:
        running.assert_serves()
        yield running


def _words(stack: FuzzedStack) -> Words:
    model = str(Path(stack.whole.config.model.path).resolve())
    url = stack.whole.config.endpoints.inference[0]
    spec = WorkflowSpec("rlvr", "", orjson.dumps(RLVR).decode())
    task = task_to_pb(Task("fuzz-0", Purpose.SERVE, spec, ROW, position=(0, 1), time_to_live_s=9.0))
    item = reward_service_pb2.ScoreItem(prompt="1+1=", completion="2", data_json='{"answer": "2"}')
    return Words(
        strings=(
            *("fuzz-0", "math", "rlvr", url, "http://127.0.0.1:1", "http://a..b:80", "http://[::1"),
            *(model, "/dev/null", "/proc/self", "areal.v1.BufferService", "a" * 64),
            *("STOP", "stop", "input_ids", "int32", "1e400", '{"answer": 1e999}', "{" * 50),
            '{"gconfig": {"n_samples": 1e9}}',
        ),
        seeds={
            "SubmitTasks": [
                buffer_service_pb2.BufferServiceSubmitTasksRequest(tasks=[task]),
                rollout_service_pb2.SubmitTasksRequest(tasks=[task]),
            ],
            "CompleteTasks": [_completion()],
            "ReturnTasks": [
                buffer_service_pb2.ReturnTasksRequest(
                    returns=[
                        buffer_service_pb2.Return(
                            lease=_LEASE, cause=buffer_service_pb2.RETURN_CAUSE_DRAIN, partial=b"x"
                        )
                    ]
                )
            ],
            "RegisterTrainer": [
                buffer_service_pb2.RegisterTrainerRequest(
                    batch_size=2, max_head_offpolicyness=1, max_concurrent_rollouts=64
                )
            ],
            "TakeBatch": [buffer_service_pb2.TakeBatchRequest(incarnation=1, step=1)],
            "ConfirmVersion": [buffer_service_pb2.ConfirmVersionRequest(incarnation=1, version=1)],
            "CommitStep": [buffer_service_pb2.CommitStepRequest(incarnation=1, step=1)],
            "RunCommand": [sandbox_service_pb2.RunCommandRequest(code="print(1)", stdin=b"x")],
            "CreateSandbox": [
                sandbox_service_pb2.CreateSandboxRequest(
                    ttl={"seconds": 1}, environment={"A": "b"}, metadata={"c": "d"}
                )
            ],
            "PublishVersion": [
                weight_sync_service_pb2.PublishVersionRequest(
                    version=policy_pb2.PolicyVersion(version=1, incarnation=1, path=model)
                )
            ],
            "Score": [
                reward_service_pb2.ScoreRequest(
                    reward=reward_service_pb2.RewardSpec(name="math", kwargs_json="{}"),
                    items=[item],
                )
            ],
        },
    )


_LEASE = buffer_service_pb2.LeaseRef(task_id="fuzz-0", token=1)


def _completion() -> buffer_service_pb2.CompleteTasksRequest:
    import numpy as np

    trajectory = Trajectory(
        trajectory_id="fuzz-0/0",
        input_ids=np.array([1, 2, 3], np.int32),
        loss_mask=np.array([0, 1, 1], np.bool_),
        behavior_logprobs=np.array([0, -1, -1], np.float32),
        token_versions=np.array([-1, 0, 0], np.int32),
        rewards=np.array([0, 0, 1], np.float32),
    )
    group = pack_group(TrajectoryGroup("fuzz-0", [trajectory]))
    completion = buffer_service_pb2.Completion(lease=_LEASE, group=group)
    return buffer_service_pb2.CompleteTasksRequest(worker_id="fuzz", completions=[completion])


@pytest.mark.parametrize(
    "name", ["buffer", "reward", "rollout", "sandbox", "trainer", "weight_sync"]
)
def test_grpc_when_fuzzed_then_it_refuses_and_stays_as_it_was(
    stack: FuzzedStack, name: str
) -> None:
    words = _words(stack)
    with channel_to(stack.grpc[name]) as channel:
        # Health and reflection are the same code in all.
        methods = discover(channel, "" if name == "trainer" else "areal.")
        assert methods
        words.seeds["SubmitTasks"] = [
            seed
            for seed in words.seeds["SubmitTasks"]
            if seed.DESCRIPTOR.full_name in {m.input_type.full_name for m in methods}
        ]
        code, details = send_too_large(channel, methods[0])
        assert code == "RESOURCE_EXHAUSTED", (code, details)
        problems = [fuzz_method(channel, method, words, 2) for method in methods]
        for method in methods:
            code, details = send_padded(channel, method, 8 * 1024 * 1024)
            if code in ("INTERNAL", "UNKNOWN", "UNAVAILABLE"):
                problems.append(f"{method.full_name} padded: {code}: {details}")
        before = stack.rss(name)
        problems += [fuzz_method(channel, method, words, SHORT) for method in methods]
    found = [problem for problem in problems if problem]
    assert not found, f"{len(found)} problems:\n" + "\n".join(found)
    stack.assert_unharmed(name, before)
    stack.assert_serves()


def test_gateway_when_fuzzed_then_no_server_error_and_it_stays_as_it_was(
    stack: FuzzedStack,
) -> None:
    url = stack.whole.config.endpoints.gateway
    stream = "/v1/events"
    fuzz_openapi(url, 2, skip=[stream])
    before = stack.rss("gateway")
    problems = fuzz_openapi(url, SHORT, skip=[stream])
    task = {"task_id": "http-0", "workflow": {"name": "rlvr", "kwargs": RLVR}, "data": ROW}
    for path, seed in (
        ("/v1/tasks", {"tasks": [{**task, "time_to_live_s": 9.0, "purpose": "train"}]}),
        ("/v1/tasks/query", {"task_ids": ["http-0"], "include_trajectories": True}),
        ("/v1/tasks/cancel", {"task_ids": ["http-0"], "reason": "x"}),
    ):
        problems.append(fuzz_route(url, "POST", path, seed, SHORT))
    problems += [fuzz_route(url, method, "/static/..%2f", None, 2) for method in METHODS]
    problems.append(fuzz_socket(url, SHORT))
    for after in ("-1", "x", "0", str(2**63), str(10**400), "\x00", ""):
        with httpx.stream("GET", f"{url}{stream}", params={"after": after}, timeout=60) as answer:
            if answer.status_code >= 500:
                problems.append(f"GET {stream}?after={after!r:.40}: HTTP {answer.status_code}")
    too_large = b'{"tasks": [' + b" " * (33 * 1024 * 1024)
    assert httpx.post(f"{url}/v1/tasks", content=too_large, timeout=30).status_code == 413
    found = [problem for problem in problems if problem]
    assert not found, f"{len(found)} problems:\n" + "\n".join(found)
    stack.assert_unharmed("gateway", before)
    stack.assert_serves()


ASKED = [{"role": "user", "content": "1+1="}]


def test_inference_when_fuzzed_then_no_server_error_and_it_stays_as_it_was(
    stack: FuzzedStack,
) -> None:
    url = stack.whole.config.endpoints.inference[0]
    model = stack.whole.config.model.path
    seeds = {
        "/generate": GENERATE,
        "/pause_generation": {"mode": "retract"},
        "/continue_generation": {"torch_empty_cache": False},
        "/abort_request": {"rid": "r", "abort_all": False},
        "/update_weights_from_disk": {
            "model_path": model,
            "load_format": "auto",
            "abort_all_requests": False,
            "weight_version": "0",
            "flush_cache": True,
            "keep_pause": False,
        },
        "/update_weight_version": {"new_version": "0", "abort_all_requests": False},
        "/weights_checker": {"action": "checksum"},
        "/v1/chat/completions": {"messages": ASKED, "max_tokens": 2},
        "/v1/messages": {"messages": ASKED, "max_tokens": 2, "model": "areal"},
        "/v1/completions": {"prompt": "1+1=", "max_tokens": 2},
    }
    # The first answer of each loads packages, which is no leak.
    for path in [path for path in seeds if path.startswith("/v1/")]:
        httpx.post(url + path, json=seeds[path], timeout=60).raise_for_status()
    routes = [(path, method) for path, methods in inference_routes() for method in methods]
    assert len(routes) >= 16
    assert seeds.keys() <= {path for path, _ in routes}
    problems: list[str] = []
    before = 0
    for short in (1, SHORT):
        before = stack.rss("inference")
        for path, method in routes:
            # 503 is what /ready and /health_generate say of a pause.
            many = 4 * short if path == "/generate" else short
            problems.append(fuzz_route(url, method, path, seeds.get(path), many, allowed=[503]))
            if path == "/release_memory_occupation":  # what was given back comes again
                httpx.post(f"{url}/resume_memory_occupation", json={}, timeout=30)
                body = {"model_path": model, "weight_version": "0", "flush_cache": False}
                loaded = httpx.post(f"{url}/update_weights_from_disk", json=body, timeout=60)
                loaded.raise_for_status()
            httpx.post(f"{url}/continue_generation", json={}, timeout=30).raise_for_status()
    problems.append(fuzz_socket(url, SHORT))
    found = [problem for problem in problems if problem]
    assert not found, f"{len(found)} problems:\n" + "\n".join(found)
    stack.assert_unharmed("inference", before)
    stack.assert_serves()


def test_boxes_when_fuzzed_over_http_then_no_server_error_and_it_stays_as_it_was(
    stack: FuzzedStack,
) -> None:
    url = stack.whole.config.endpoints.sandbox_http
    lease = {"timeout": 1, "envVars": {"A": "b"}, "metadata": {"c": "d"}, "templateID": "base"}
    start = {"process": {"cmd": "sh", "args": ["-c", "true"], "envs": {"A": "b"}, "cwd": "/tmp"}}
    routes = [
        ("POST", "/sandboxes", lease),
        ("POST", "/v2/sandboxes", lease),
        ("GET", "/v2/sandboxes?metadata=c%3Dd%26%00", None),
        ("DELETE", "/sandboxes/x", None),
        *[
            ("POST", f"/sandboxes/{{id}}/{each}", {"timeout": 60})
            for each in ("timeout", "connect")
        ],
        *[(each, "/files?path=a%00b", None) for each in ("GET", "POST")],
        *[
            ("POST", f"/process.Process/{each}", seed)
            for each, seed in (
                ("Start", start),
                ("Connect", {"process": {"pid": 1}}),
                ("List", {}),
                ("SendInput", {"process": {"pid": 1}, "input": {"stdin": "eA=="}}),
                ("SendSignal", {"process": {"pid": 1}, "signal": "SIGNAL_SIGKILL"}),
                ("StreamInput", {}),
            )
        ],
        *[
            ("POST", f"/filesystem.Filesystem/{each}", seed)
            for each, seed in (
                ("Stat", {"path": "a"}),
                ("ListDir", {"path": ".", "depth": 1}),
                ("MakeDir", {"path": "d"}),
                ("Move", {"source": "a", "destination": "b"}),
                ("Remove", {"path": "a"}),
            )
        ],
    ]
    problems, before = [], 0
    for short in (2, SHORT):
        before = stack.rss("sandbox")
        for method, path, seed in routes:
            for lent in httpx.get(f"{url}/v2/sandboxes", timeout=60).json():  # by what was sent
                httpx.delete(f"{url}/sandboxes/{lent['sandboxID']}", timeout=60)
            box = httpx.post(f"{url}/sandboxes", json={"timeout": 600}, timeout=60).json()
            headers = {
                "E2b-Sandbox-Id": box["sandboxID"],
                "X-Access-Token": box["envdAccessToken"],
            }
            target = path.replace("{id}", box["sandboxID"])
            # 502 is what E2B's SDK expects of a box that has ended.
            problems.append(
                fuzz_route(url, method, target, seed, short, allowed=[502], headers=headers)
            )
    problems.append(fuzz_socket(url, SHORT))
    found = [problem for problem in problems if problem]
    assert not found, f"{len(found)} problems:\n" + "\n".join(found)
    stack.assert_unharmed("sandbox", before)
    stack.assert_serves()


def test_metrics_and_healthz_when_fuzzed_then_no_server_error(stack: FuzzedStack) -> None:
    # The same code in every service: one of them is enough.
    url, before = f"http://{stack.whole.metrics['reward']}", stack.rss("reward")
    problems = [
        fuzz_route(url, method, path, {"a": [1]}, SHORT)
        for path in ("/metrics", "/healthz", "/waits", "/%2e%2e/x")
        for method in METHODS
    ]
    problems.append(fuzz_socket(url, 4 * SHORT))
    found = [problem for problem in problems if problem]
    assert not found, f"{len(found)} problems:\n" + "\n".join(found)
    stack.assert_unharmed("reward", before)
    stack.assert_serves()


GENERATE = {
    "input_ids": [257, 55, 43, 56, 258],
    "sampling_params": {
        "max_new_tokens": 4,
        "min_new_tokens": 0,
        "temperature": 1.0,
        "top_p": 0.9,
        "top_k": 5,
        "stop_token_ids": [3],
        "ignore_eos": True,
        "n": 2,
        "sampling_seed": 7,
        "skip_special_tokens": True,
        "stop": None,
        "min_p": 0.0,
    },
    "return_logprob": True,
    "logprob_start_len": 0,
    "stream": False,
    "rid": "r",
    "extra_key": "0",
    "return_text_in_logprobs": True,
    "image_data": None,
}


def inference_routes() -> list[tuple[str, list[str]]]:
    """Every route of the engine's application, which has no OpenAPI document."""
    service = SimpleNamespace(
        model=None,
        config=SimpleNamespace(command_timeout_s=1.0, enable_lora=True),
        encode=lambda: None,
        decode=lambda: None,
    )
    return [
        (route.path, sorted(route.methods or ()))
        for route in build_app(cast("Any", service), Security()).routes
        if isinstance(route, Route)
    ]
