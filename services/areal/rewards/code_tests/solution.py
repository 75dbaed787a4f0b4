"""The process of the code under test: runs it, and does what the tests ask of it.

It has neither the tests nor what they expect, so it can only compute. It has nothing to protect:
all that it sends is taken for what the code under test may have made up.
"""

import enum
import io
import os
import sys
import types
from collections.abc import Callable
from importlib import import_module
from typing import Any, NoReturn

from areal.rewards.code_tests.far import KINDS, OPERATIONS
from areal.rewards.code_tests.values import Table, is_namedtuple, standard
from areal.rewards.code_tests.wire import Peer

_PRINTED = 1 << 14
_ROOM_TO_RECURSE = 100
# Plain types, and what reads the content of an instance past methods that its class overrides.
_CONTENTS: tuple[tuple[type, Callable[[Any], Any]], ...] = (
    (int, int.__int__),
    (float, float.__float__),
    (str, str.__str__),
    (complex, lambda value: complex(value.real, value.imag)),
    (bytes, lambda value: bytes.__getitem__(value, slice(None))),
    (dict, lambda value: {key: dict.__getitem__(value, key) for key in dict.__iter__(value)}),
    (list, lambda value: list(list.__iter__(value))),
    (tuple, lambda value: tuple(tuple.__iter__(value))),
    (set, lambda value: set(set.__iter__(value))),
    (frozenset, lambda value: frozenset(frozenset.__iter__(value))),
    (bytearray, lambda value: bytearray(bytearray.__iter__(value))),
)


class Kept(io.RawIOBase):
    """Standard output: keeps the beginning of what is printed, and drops the rest."""

    def __init__(self) -> None:
        self._kept = bytearray()

    def writable(self) -> bool:
        """Returns True, as a file that is open for writing does."""
        return True

    def fileno(self) -> int:
        """Returns the descriptor to which programs that the code starts print."""
        return 1

    def write(self, data: Any) -> int:
        """Takes all of it."""
        room = _PRINTED - len(self._kept)
        if room > 0:
            self._kept += bytes(data)[:room]
        return len(data)

    def take(self) -> str:
        """Returns what was printed since the last call."""
        text = self._kept.decode(errors="replace")
        self._kept.clear()
        return text


class Solution(Peer):
    """The end of the code under test."""

    believes = True

    def __init__(self, reader: int, writer: int) -> None:
        super().__init__(reader, writer)
        self._module = types.ModuleType("solution")
        self._classes: tuple[type, ...] = ()
        self._loop: Any = None
        self._kept: Any = Kept()

    def serve(self, do: str, arguments: list[Any]) -> Any:
        """Does what the tests ask."""
        if do == "load":
            return self._load(*arguments)
        if do == "get":
            return self._module.__dict__[arguments[0]]
        if do == "classes":
            named = [self._module.__dict__[name] for name in arguments[0]]
            self._classes = tuple(each for each in named if isinstance(each, type))
            return None
        if do == "content":
            return self._content(arguments[0])
        if do == "await":
            self._loop = self._loop or import_module("asyncio").new_event_loop()
            return self._loop.run_until_complete(arguments[0])
        return OPERATIONS[do](*arguments)

    def pack_other(self, table: Table, value: Any) -> Any:  # noqa: PLR0911  (one for each kind)
        """Classes, coroutines, what is derived from plain values, and objects of this process."""
        kind = type(value)
        if isinstance(value, BaseException):
            return self.pack_error(table, value)
        if isinstance(value, type):
            if issubclass(value, BaseException):
                return self.pack_error_class(value)
            if value.__module__ == "builtins" and value.__name__ in KINDS:
                return ["global", "builtins", value.__name__]
            return self.pack_far(value)
        if kind is types.CoroutineType:
            return ["coroutine", *self.pack_far(value)[1:]]
        if isinstance(value, (*self._classes, enum.Enum)):
            return self.pack_far(value, content=self._content(value) is not value)
        if is_namedtuple(value):
            return table.pack_namedtuple(value)
        content = self._content(value)
        return self.pack_far(value) if content is value else table.pack(content)

    def operators(self, shape: dict[str, Any]) -> bool:
        """An object of the tests has their operators."""
        return True

    def resolve(self, module: str, name: str) -> Any:
        """Finds a name of the standard library for the tests."""
        return standard(module, name)

    def printed(self) -> str:
        """Returns what the code printed since the last reply."""
        return str(self._kept.take())

    def broken(self, why: str) -> NoReturn:
        """The tests have ended."""
        os._exit(0)

    def _load(self, code: str) -> list[tuple[str, bool]]:
        """Runs the code; returns its names, and which are classes."""
        out = io.TextIOWrapper(self._kept, encoding="utf-8", errors="replace", write_through=True)
        sys.stdin, sys.stdout, sys.stderr = open(0, encoding="utf-8", errors="replace"), out, out  # noqa: SIM115
        sys.argv = ["solution.py"]
        sys.setrecursionlimit(sys.getrecursionlimit() + _ROOM_TO_RECURSE)
        sys.modules["__main__"] = sys.modules["solution"] = self._module
        names = self._module.__dict__
        exec(compile(code, "solution.py", "exec", dont_inherit=True), names)  # noqa: S102  (in a box)
        return [(name, isinstance(names[name], type)) for name in names if type(name) is str]

    @staticmethod
    def _content(value: Any) -> Any:
        """The plain value in an object whose class is derived from a plain value's; else itself."""
        for kind, read in _CONTENTS:
            if isinstance(value, kind):
                return read(value)
        return value


def serve(reader: int, writer: int) -> NoReturn:
    """Does what the tests ask until they end."""
    Solution(reader, writer).answer_all()
    os._exit(0)
