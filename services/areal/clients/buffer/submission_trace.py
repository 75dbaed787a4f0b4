"""The span with which a task's trace begins: its submission to the ledger."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from areal.chassis import tracing
from areal.protocol.trajectories import PURPOSE_FROM_PB
from areal.v1.trajectory_pb2 import Task


@contextmanager
def submitting(tasks: Sequence[Task], accepted: Sequence[bool]) -> Iterator[None]:
    """A span `submit` for each task, until the ledger has answered for all.

    Args:
        tasks: With a traceparent of its own, a task continues with that trace; else with the
            current one; else it begins one. Each gets its span as traceparent: the worker that
            leases it continues from there.
        accepted: The ledger's answers, filled in by the block.
    """
    if not tracing.enabled():
        yield
        return
    spans = [
        tracing.start(
            "submit",
            {
                "areal.task_id": task.task_id,
                "areal.purpose": PURPOSE_FROM_PB.get(task.purpose, ""),
            },
            parent=task.traceparent or None,
            root=True,
        )
        for task in tasks
    ]
    for task, span in zip(tasks, spans, strict=True):
        task.traceparent = tracing.traceparent(span) or task.traceparent
    try:
        yield
    finally:
        for number, span in enumerate(spans):
            if span is not None:
                if number < len(accepted):
                    span.set_attribute("areal.accepted", accepted[number])
                span.end()
