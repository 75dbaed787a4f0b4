"""Whose fault an exception of an episode is, and what to say about it."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from areal.errors import CapacityExceeded, PromptDrift, Unavailable, WaitTimeout, WorkflowError

_INFRASTRUCTURE = (Unavailable, WaitTimeout, CapacityExceeded)


@dataclass(frozen=True, slots=True)
class Failure:
    """What ReturnTasks is told."""

    infrastructure: bool
    """A server, the reward service or the network failed; else it is the workflow's fault."""
    detail: str
    traceback: str = ""
    failed_server: str = ""
    drift: bool = False
    """A later prompt did not begin with the tokens before it."""


def _leaves(error: BaseException) -> Iterator[BaseException]:
    """The exceptions of a group, which TaskGroup raises; else the exception itself."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


def describe_failure(error: BaseException) -> Failure:
    """Of several at once the workflow's own error counts first."""
    leaves = list(_leaves(error))
    own = [leaf for leaf in leaves if not isinstance(leaf, _INFRASTRUCTURE)]
    leaf = own[0] if own else leaves[0]
    if not own:
        return Failure(
            infrastructure=True,
            detail=_line(str(leaf)),
            failed_server=str(getattr(leaf, "failed_server", "")),
        )
    if isinstance(leaf, WorkflowError) and leaf.traceback:
        return Failure(False, _line(str(leaf)), leaf.traceback[-8000:])
    text = "".join(traceback.format_exception(error))[-8000:]
    drift = isinstance(leaf, PromptDrift)
    return Failure(False, _line(f"{type(leaf).__name__}: {leaf}"), text, drift=drift)


def where_it_waits(task: asyncio.Task[Any]) -> tuple[str, str]:
    """("file:line in function" of the workflow, stack) of a suspended task."""
    frames: list[str] = []
    line = ""
    coroutine: Any = task.get_coro()
    while coroutine is not None and getattr(coroutine, "cr_frame", None) is not None:
        frame = coroutine.cr_frame
        code = frame.f_code
        frames.append(f'  File "{code.co_filename}", line {frame.f_lineno}, in {code.co_name}\n')
        if code.co_name == "arun_episode":
            line = f"{code.co_filename}:{frame.f_lineno}"
        coroutine = coroutine.cr_await
    return line or "its start", "".join(frames)


def _line(text: str) -> str:
    """One line for people."""
    return " ".join(text.split())[:1000]
