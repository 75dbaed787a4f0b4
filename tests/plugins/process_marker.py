"""Marks the tests that start processes, and holds all others to it.

The marker `process` comes from what a test mentions: its own code, its fixtures, the functions of
`tests/`, `tools/` and `services/` that these call by name, and modules of `services/` that start
processes themselves. A test that starts one all the same fails with a line that says so, so that
`make test-fast` keeps its word. Stores (Redis, NATS) do not count: they are small C programs that
are up in milliseconds; nor does `uname`, which Python's own module `platform` runs once.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest

MARKER = "process"
_STARTERS = {"subprocess", "multiprocessing"}
"""Modules whose mention means a process, also by an import inside a function."""
_STARTING_NAMES = {
    *("create_subprocess_exec", "create_subprocess_shell", "ProcessPoolExecutor"),
    *("posix_spawn", "posix_spawnp", "fork", "forkpty", "fork_exec"),
    "start_s3",  # a store that is a Python program: not a small one
}
_EVENTS = {"subprocess.Popen", "os.posix_spawn", "os.fork", "os.forkpty"}
_SMALL = ("redis-server", "valkey-server", "nats-server", "uname")
_STORE_MODULE = "tests.store_process"


def names_in(code: CodeType) -> set[str]:
    """Global names and attributes that a function mentions, those of its inner functions too."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= names_in(constant)
    return names


def functions_of(thing: object) -> Iterator[FunctionType]:
    """The functions behind a function, a decorated one, a fixture or a class of `tests/`."""
    if isinstance(thing, type):
        for base in thing.__mro__:
            if _is_ours(base.__module__) and base.__module__ != _STORE_MODULE:
                for each in vars(base).values():
                    each = getattr(each, "fget", each)
                    each = getattr(each, "__func__", each)
                    if isinstance(each, FunctionType):
                        yield inspect.unwrap(each)
        return
    thing = inspect.unwrap(thing) if callable(thing) else thing
    thing = getattr(thing, "func", thing)  # functools.partial
    thing = getattr(thing, "__func__", thing)
    if isinstance(thing, FunctionType):
        yield thing


class ProcessCode:
    """Finds what starts a process; remembers what it has read and found.

    Thousands of tests mention the same functions, so each of these is followed once.
    """

    def __init__(self) -> None:
        self._found: dict[CodeType, bool] = {}
        self._read: dict[CodeType, tuple[bool, list[FunctionType]]] = {}
        self._modules: dict[str, bool] = {}

    def starts_process(self, *things: object) -> bool:
        """Whether the code of one of these mentions what starts a process, however deep."""
        return any(self._starts(each) for thing in things for each in functions_of(thing))

    def _starts(self, first: FunctionType) -> bool:
        """Whether a function does, or one that it mentions."""
        ahead, seen = [first], set[CodeType]()
        while ahead:
            function = ahead.pop()
            code = function.__code__
            if code in seen or self._found.get(code) is False:
                continue
            seen.add(code)
            starts, uses = (True, []) if code in self._found else self._mentions(function)
            if starts:
                self._found[code] = self._found[first.__code__] = True
                return True
            ahead += uses
        # All that was reached from here was followed to its end.
        self._found.update(dict.fromkeys(seen, False))
        return False

    def _mentions(self, function: FunctionType) -> tuple[bool, list[FunctionType]]:
        """Whether it starts a process by itself, and which functions of `tests/` it mentions."""
        code = function.__code__
        if code not in self._read:
            names = names_in(code)
            starts, uses = bool(names & (_STARTING_NAMES | _STARTERS)), []
            for name in names:
                thing = function.__globals__.get(name)
                if isinstance(thing, ModuleType):
                    starts |= _package(thing.__name__) in _STARTERS
                    if _is_ours(thing.__name__):
                        for each in names:
                            uses += functions_of(getattr(thing, each, None))
                    continue
                module = getattr(thing, "__module__", None) or ""
                starts |= _package(module) in _STARTERS
                if module.startswith("areal"):
                    starts |= self._module_starts(module)
                if _is_ours(module) and module != _STORE_MODULE:
                    uses += functions_of(thing)
            for default in (
                *(function.__defaults__ or ()),
                *(function.__kwdefaults__ or {}).values(),
            ):
                uses += functions_of(default)
            self._read[code] = starts, uses
        return self._read[code]

    def _module_starts(self, name: str) -> bool:
        """Whether a module of `services/` starts processes itself."""
        if name not in self._modules:
            content = list(vars(sys.modules[name]).values()) if name in sys.modules else []
            own = [thing for thing in content if getattr(thing, "__module__", "") == name]
            own += [
                each for thing in own if isinstance(thing, type) for each in vars(thing).values()
            ]
            self._modules[name] = any(
                isinstance(thing, ModuleType) and thing.__name__ in _STARTERS for thing in content
            ) or any(
                names_in(thing.__code__) & _STARTING_NAMES
                for thing in own
                if isinstance(thing, FunctionType)
            )
        return self._modules[name]


def _package(module: str) -> str:
    return module.partition(".")[0]


def _is_ours(module: str) -> bool:
    return module.startswith(("tests.", "test_", "conftest", "tools.", "areal"))


class ProcessMarker:
    """The plugin: marks when tests are collected, watches while they run."""

    def __init__(self) -> None:
        self._watching = False
        self._started: list[str] = []
        self._code = ProcessCode()
        sys.addaudithook(self._heard)

    @pytest.hookimpl(tryfirst=True)  # before pytest selects by markers
    def pytest_collection_modifyitems(self, items: Sequence[pytest.Item]) -> None:
        for item in items:
            if isinstance(item, pytest.Function) and self._code.starts_process(*_uses(item)):
                item.add_marker(MARKER)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        with self._watched(item):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        with self._watched(item):
            return (yield)

    @contextmanager
    def _watched(self, item: pytest.Item) -> Iterator[None]:
        self._watching, self._started = item.get_closest_marker(MARKER) is None, []
        yield
        self._watching = False
        if self._started:
            pytest.fail(
                f"starts processes ({', '.join(self._started)}), but mentions nothing that does: "
                f"mark it @pytest.mark.{MARKER}",
                pytrace=False,
            )

    def _heard(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Python calls this for everything audited in this process; it must be quick."""
        if event not in _EVENTS or not self._watching:
            return
        program = "" if event.startswith("os.fork") else Path(os.fsdecode(arguments[0])).name
        if not program.startswith(_SMALL):
            self._started.append(program or event)


def _uses(item: pytest.Function) -> Iterator[object]:
    """A test's function, its fixtures, and its parameters that are functions or classes."""
    yield item.function
    for definitions in item._fixtureinfo.name2fixturedefs.values():
        for definition in definitions:
            yield definition.func
    if hasattr(item, "callspec"):
        yield from (value for value in item.callspec.params.values() if callable(value))
