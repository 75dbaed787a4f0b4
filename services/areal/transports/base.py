"""What the trainer's side of every transport is."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from areal.errors import ArealError
from areal.tensor_file import HostTensor
from areal.weights import PolicyVersion, version_name

# What a server may read beside the weights.
_COMPANIONS = ("*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt")
_MAX_THREADS = 4
_T = TypeVar("_T")
_R = TypeVar("_R")


class TransportError(ArealError):
    """A version could not be carried this way; the message says why. Another way may do."""


@dataclass(frozen=True)
class NewVersion:
    """What a trainer publishes, in its memory.

    Example:
        >>> NewVersion(12, 3, (HostTensor("model.norm.weight", (128,), "F32", view),), model_dir)
    """

    version: int
    """Finished train steps."""
    incarnation: int
    tensors: tuple[HostTensor, ...]
    model: Path
    """Directory that config and tokenizer are copied from."""

    @property
    def name(self) -> str:
        """Of its folder."""
        return version_name(self.version, self.incarnation)


class Publisher(Protocol):
    """Brings a version to where servers can get it."""

    name: str

    def publish(self, new: NewVersion, announce: Callable[[PolicyVersion], None]) -> PolicyVersion:
        """Carries the bytes, then announces the version; blocking.

        Raises:
            TransportError: It cannot be done this way.
            ArealError: `announce` was refused for another reason.
        """


def companions(model: Path) -> Iterator[Path]:
    """Configuration and tokenizer files of a model directory."""
    for pattern in _COMPANIONS:
        for file in sorted(model.glob(pattern)):
            if not file.name.endswith(".index.json") and file.name != "manifest.json":
                yield file


def in_threads(work: Callable[[_T], _R], items: Iterable[_T]) -> list[_R]:
    """`[work(item) for item in items]`, a few at a time: hashing and copying free the interpreter.

    As many threads as this process may use cores, at most four: memory is no faster with more.
    """
    threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(threads, "weights") as pool:
        return list(pool.map(work, items))
