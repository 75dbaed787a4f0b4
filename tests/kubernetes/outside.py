"""A gRPC client that is no part of the cluster: tasks in, results out, and a door that is shut."""

from __future__ import annotations

import asyncio
import json
import uuid
from pathlib import Path

import grpc
from tests.certificates import Authority
from tests.kubernetes.cluster import Failed

from areal.clients.rollout import RolloutClient
from areal.security import Security, SecurityConfig
from areal.types import Purpose, Task, WorkflowSpec
from areal.v1 import rollout_service_pb2 as pb
from areal.v1 import rollout_service_pb2_grpc as pb_grpc

SUMS = 4


def security(authority: Authority, folder: Path, token: str) -> Security:
    """What a client needs: the token, a certificate of its own, the authority."""
    file = folder / "token"
    file.touch(mode=0o600)
    file.write_text(token)
    return Security.load(SecurityConfig(dir=str(folder), tls_dir=str(authority.tls_dir("client"))))


def tasks() -> list[Task]:
    """Sums, answered by the model as it is now."""
    spec = WorkflowSpec(
        name="rlvr",
        kwargs_json=json.dumps({"reward_fn": "math", "gconfig": {"max_new_tokens": 8}}),
    )
    name = uuid.uuid4().hex[:8]
    return [
        Task(
            task_id=f"outside-{name}-{number}",
            purpose=Purpose.SERVE,
            workflow=spec,
            data={"prompt": f"{20 + number}+{30 + number}=", "answer": str(50 + 2 * number)},
        )
        for number in range(SUMS)
    ]


async def _serve(address: str, allowed: Security) -> list[str]:
    """The ends of all tasks, with their reasons."""
    client = RolloutClient(address, allowed)
    try:
        submitted = tasks()
        await client.submit_tasks(submitted)
        ids = [task.task_id for task in submitted]
        async with asyncio.timeout(240):
            records = [record async for record in client.watch_tasks(ids, timeout=230)]
    finally:
        await client.close()
    return [f"{record.state.value} {record.reason}".strip() for record in records]


async def _refusal(channel: grpc.aio.Channel, metadata: tuple[tuple[str, str], ...]) -> str:
    try:
        await pb_grpc.RolloutServiceStub(channel).SubmitTasks(
            pb.SubmitTasksRequest(), timeout=10, metadata=metadata
        )
    except grpc.aio.AioRpcError as error:
        return error.code().name
    finally:
        await channel.close()
    return "OK"


async def check(address: str, allowed: Security) -> str:
    """Submits with the token over TLS; looks that neither can be left out."""
    tls = allowed.tls
    assert tls is not None
    ends = await _serve(address, allowed)
    if ends != ["delivered"] * SUMS:
        raise Failed(f"{address}: expected {SUMS} tasks delivered, got {ends}")
    trusted = grpc.ssl_channel_credentials(tls.authorities, tls.key, tls.certificate)
    nameless = grpc.ssl_channel_credentials(tls.authorities)
    wrong = (("authorization", "Bearer " + "0" * 32),)
    right = (("authorization", f"Bearer {allowed.token}"),)
    answers = {
        "no token": await _refusal(grpc.aio.secure_channel(address, trusted), ()),
        "another token": await _refusal(grpc.aio.secure_channel(address, trusted), wrong),
        "no certificate": await _refusal(grpc.aio.secure_channel(address, nameless), right),
        "no TLS": await _refusal(grpc.aio.insecure_channel(address), right),
    }
    expected = {"no token": "UNAUTHENTICATED", "another token": "UNAUTHENTICATED"}
    for what, code in answers.items():
        if code != expected.get(what, "UNAVAILABLE"):
            raise Failed(f"{address}, {what}: answered {code}")
    return f"{SUMS} tasks delivered; refused: clients with {', '.join(answers)}"
