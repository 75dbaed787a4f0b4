"""The span of one lease: everything between a task's leaving the queue and its ending."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from areal.chassis import tracing
from areal.protocol.leases import Lease

if TYPE_CHECKING:
    from opentelemetry.util.types import AttributeValue

EpisodeT = TypeVar("EpisodeT")


def traced(
    lease: Lease,
    worker_id: str,
    live: Callable[[EpisodeT], Coroutine[Any, Any, None]],
    episode: EpisodeT,
) -> Coroutine[Any, Any, None]:
    """Runs `live(episode)` within spans of the task's trace, if it has one."""
    if not (lease.task.traceparent and tracing.enabled()):
        return live(episode)
    return _within(lease, worker_id, live, episode)


async def _within(
    lease: Lease, worker_id: str, live: Callable[[EpisodeT], Awaitable[None]], episode: EpisodeT
) -> None:
    task = lease.task
    if lease.queued_time:
        waited = tracing.start(
            "wait_lease",
            {"areal.task_id": task.task_id},
            parent=task.traceparent,
            start_s=lease.queued_time,
        )
        if waited is not None:
            waited.end()
    attributes: Mapping[str, AttributeValue] = {
        "areal.task_id": task.task_id,
        "areal.workflow": task.workflow.name,
        "areal.worker_id": worker_id,
        "areal.lease_token": lease.token,
        "areal.policy_version": lease.policy_version,
        "areal.resumed": bool(lease.partial),
        "areal.failed_servers": lease.failed_servers,
    }
    with tracing.span("lease", attributes, parent=task.traceparent):
        await live(episode)
