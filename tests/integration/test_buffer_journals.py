"""What a lease that is returned leaves for the next attempt, with room for it and without."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.buffer_client import BufferClient
from tests.buffer_server import register, start_buffer
from tests.ledger_support import incompressible, make_task

from areal.protocol.leases import Return, ReturnCause


@pytest.mark.parametrize(("limit_mb", "kept"), [(1024, b"half an episode"), (1, b"")])
async def test_return_when_the_ledger_is_at_its_limit_then_the_next_attempt_starts_afresh(
    buffer_redis: str, tmp_path: Path, limit_mb: int, kept: bytes
) -> None:
    with start_buffer(tmp_path, buffer_redis, f"buffer.max_memory_mb={limit_mb}") as address:
        client = BufferClient(address)
        try:
            incarnation = await register(client)
            tasks = [make_task(name) for name in ("large", "a")]
            assert await client.submit_tasks(tasks, incarnation=incarnation) == [True, True]
            leases, _ = await client.lease_tasks("w1", 2, 1)
            tokens = {lease.task.task_id: lease.token for lease in leases}
            large = incompressible("large")
            assert await client.complete_task("large", tokens["large"], large, "w1")
            await client.return_task(
                "a", tokens["a"], Return(ReturnCause.DRAIN, partial=lambda: b"half an episode")
            )
            (lease,), _ = await client.lease_tasks("w2", 1, 10)
            assert (lease.task.task_id, lease.partial) == ("a", kept)
        finally:
            await client.close()
