"""The span with which a task's trace begins: its submission to the ledger."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from areal.chassis import tracing
from areal.types import Task


@contextmanager
def submitting(tasks: Sequence[Task], accepted: Sequence[bool]) -> Iterator[Sequence[Task]]:
    """A span `submit` for each task, until the ledger has answered for all.

    Args:
        tasks: With a traceparent of its own, a task continues with that trace; else with the
            current one; else it begins one.
        accepted: The ledger's answers, filled in by the block.

    Yields:
        The tasks, each with its span as traceparent: whoever leases one continues from there.
    """
    if not tracing.enabled():
        yield tasks
        return
    spans = [
        tracing.start(
            "submit",
            {"areal.task_id": task.task_id, "areal.purpose": task.purpose.value},
            parent=task.traceparent or None,
            root=True,
        )
        for task in tasks
    ]
    try:
        yield [
            replace(task, traceparent=tracing.traceparent(span) or task.traceparent)
            for task, span in zip(tasks, spans, strict=True)
        ]
    finally:
        for number, span in enumerate(spans):
            if span is not None:
                if number < len(accepted):
                    span.set_attribute("areal.accepted", accepted[number])
                span.end()
