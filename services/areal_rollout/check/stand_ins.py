"""Runs a recipe's `main` up to its first batch, without torch and without services.

    main ──> FSDPPPOActor(...)      a stand-in: engines, algorithms and training of areal_torch
         ──> rollout.evaluate(...)  noted: its first row and its workflow
         ──> rollout.prepare_batch  noted; main ends here

A recipe needs nothing for this: rows and workflow are those that its own lines hand over.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import areal
from areal.errors import InvalidInput
from areal.runs.evaluation_arguments import check_arguments

_REPLACED = ("areal_torch.engines.", "areal_torch.algorithms.", "areal_torch.training.")
_ROLLOUT = "RemoteSGLangEngine"


class FirstBatch(BaseException):
    """`main` has asked for a batch; there is nothing more to learn from it."""


@dataclass(frozen=True)
class Sample:
    """A row, and the workflow that `main` has for it."""

    of: str
    """"": training; else the evaluation's name."""
    workflow: Any
    row: dict[str, Any]


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Takes the place of the engines while `installed`.

    `guesses` names what `main` asked a stand-in that it cannot know (anything but to exist and
    for its version, which is 0): an error after that may not be the recipe's.
    """

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self.guesses: list[str] = []

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Imports below these packages give stand-ins, until the end of it."""
        hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if _replaced(name)}
        sys.meta_path.insert(0, self)
        try:
            yield
        finally:
            sys.meta_path.remove(self)
            for name in [name for name in sys.modules if _replaced(name)]:
                del sys.modules[name]
                parent, _, child = name.rpartition(".")
                vars(sys.modules.get(parent, areal)).pop(child, None)
            sys.modules.update(hidden)

    # -- modules ------------------------------------------------------------------------------

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        if not _replaced(name):
            return None
        return importlib.util.spec_from_loader(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """Returns a module that has every name."""
        return _Module(spec.name, self.make)

    def exec_module(self, module: ModuleType) -> None:
        """Does nothing: there is no code to run."""

    def make(self, name: str) -> type:
        """Returns what a replaced module has under a name."""
        base = _Rollout if name == _ROLLOUT else _StandIn
        return _Kind(name, (base,), {"_of": self})

    def guessed(self, what: str) -> Any:
        self.guesses.append(what)
        return self.make("Value")()


def _replaced(name: str) -> bool:
    return name.startswith(_REPLACED)


class _Module(ModuleType):
    def __init__(self, name: str, make: Callable[[str], type]) -> None:
        super().__init__(name)
        self._make = make

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = self._make(name)
        setattr(self, name, value)
        return value


class _Kind(type):
    """Metaclass of the stand-ins: a recipe may extend them, or call their class methods."""

    _of: StandIns

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return cls._of.guessed(f"{cls.__name__}.{name}")


class _StandIn(metaclass=_Kind):
    _of: StandIns

    def __init__(self, *_: Any, **__: Any) -> None:
        name = type(self).__name__
        if name[0].islower():  # a function, and here is its result
            self._of.guessed(f"{name}()")

    def get_version(self) -> int:
        """Returns 0, as at the start of a run."""
        return 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._of.guessed(f"{type(self).__name__}.{name}")

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self._of.guessed(f"{type(self).__name__}()")

    def __getitem__(self, key: Any) -> Any:
        return self._of.guessed(f"{type(self).__name__}[{key!r}]")

    def __setitem__(self, key: Any, value: Any) -> None:
        self._of.guessed(f"{type(self).__name__}[{key!r}]")


class _Rollout(_StandIn):
    """Receives rows and workflow in the place of `areal.RemoteSGLangEngine`."""

    def prepare_batch(
        self, dataloader: Iterable[Any] | None, workflow: Any = None, *_: Any, **__: Any
    ) -> Any:
        if dataloader is None:  # outside agents: nothing to try
            raise FirstBatch
        item = next(iter(dataloader), None)
        if item is None:
            raise InvalidInput("prepare_batch(dataloader): it has no rows")
        if not isinstance(item, tuple) or len(item) != 3:
            raise InvalidInput(
                f"prepare_batch(dataloader): its items are {_kind(item)}, expected (epoch, index, "
                "row), as areal.StatefulLoader yields"
            )
        self._note("", workflow, item[2])
        raise FirstBatch

    def rollout_batch(self, data: Iterable[Any], workflow: Any, *_: Any, **__: Any) -> Any:
        row = next(iter(data), None)
        if row is None:
            raise InvalidInput("rollout_batch(data): expected at least one row, got none")
        self._note("", workflow, row)
        raise FirstBatch

    def evaluate(
        self, rows: Sequence[Any], workflow: Any, name: str = "evaluation", *_: Any, **__: Any
    ) -> float:
        check_arguments(rows, name)
        for row in rows:
            self._note(name, workflow, row)
            break
        return 0.0

    def _note(self, of: str, workflow: Any, row: Any) -> None:
        if not isinstance(row, Mapping):
            raise InvalidInput(f"row {row!r:.80}: expected a mapping, got {_kind(row)}")
        self._of.samples.append(Sample(of, workflow, dict(row)))


def _kind(value: Any) -> str:
    return type(value).__name__
