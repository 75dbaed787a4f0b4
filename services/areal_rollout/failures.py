"""Decides whether an episode's exception is the recipe's or the infrastructure's fault."""

from __future__ import annotations

import asyncio
import re
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path, PurePath
from typing import Any

import areal
from areal.errors import CapacityExceeded, Unavailable, WaitTimeout, WorkflowError
from areal.protocol.leases import Return, ReturnCause

_INFRASTRUCTURE = (Unavailable, WaitTimeout, CapacityExceeded)
# What a sentence ends with, and what it says has happened.
_PLACE = re.compile(r" \(([^()]+):(\d+)\)$")
_WHAT = re.compile(r"\braised (\w+)|\b(returned \w+)")
_LIBRARIES = (
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    str(Path(areal.__file__).parents[1]),
    "<",  # frozen modules
)


def _leaves(error: BaseException) -> Iterator[BaseException]:
    """The exceptions of a group, which TaskGroup raises; else the exception itself."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


def leading_error(error: BaseException) -> BaseException:
    """Returns the error to report out of several: the workflow's own error first."""
    leaves = list(_leaves(error))
    return next((leaf for leaf in leaves if not isinstance(leaf, _INFRASTRUCTURE)), leaves[0])


def describe_failure(error: BaseException) -> Return:
    """Returns how the lease ends after an episode's exception, without its journal."""
    leaf = leading_error(error)
    if isinstance(leaf, _INFRASTRUCTURE):
        return Return(
            ReturnCause.INFRASTRUCTURE,
            detail=_line(str(leaf)),
            failed_server=str(getattr(leaf, "failed_server", "")),
        )
    if isinstance(leaf, WorkflowError) and leaf.traceback:
        return _own(str(leaf), leaf.traceback)
    name = type(leaf).__name__
    line = str(leaf) if isinstance(leaf, WorkflowError) else f"{name}: {leaf}"
    text = "".join(traceback.format_exception(_without_repeats(error)))
    if not _PLACE.search(line):
        line = _line(line)[:800] + (_where_raised(leaf) or _where_raised(error))
    return _own(line, text, name)


def _without_repeats(error: BaseException) -> BaseException:
    """Returns the exception; from a group, exceptions with equal tracebacks are kept once."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    seen: set[str] = set()

    def first(each: BaseException) -> bool:
        if isinstance(each, BaseExceptionGroup):
            return False  # look into it
        text = "".join(traceback.format_exception(each))
        repeated = text in seen
        seen.add(text)
        return not repeated

    return error.subgroup(first) or error


def _own(line: str, trace: str, kind: str = "") -> Return:
    """An error of the recipe; `kind` where the line does not say it."""
    line, site = _line(line), ""
    place, what = _PLACE.search(line), _WHAT.search(line)
    if place:
        said = (what.group(1) or what.group(2)) if what else kind or "error"
        site = f"{said} at {PurePath(place.group(1)).name}:{place.group(2)}"
    return Return(ReturnCause.WORKFLOW_ERROR, line, trace[-8000:], site=site)


def _where_raised(error: BaseException) -> str:
    """The recipe's last line that it passed, as " (file:line)"; "": there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)]
    return f" ({own[-1].filename}:{own[-1].lineno})" if own else ""


def where_defined(function: Callable[..., Any]) -> str:
    """Returns where a function is defined, as " (file:line)"; "" if it has no source."""
    code = getattr(function, "__code__", None)
    return f" ({code.co_filename}:{code.co_firstlineno})" if code else ""


def where_it_waits(task: asyncio.Task[Any]) -> tuple[str, str]:
    """Returns ("file:line in function" of the workflow, stack) of a suspended task."""
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
    return " ".join(text.split())[:1000]
