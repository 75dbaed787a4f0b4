"""The trainer's side of every transport."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from areal.errors import ArealError
from areal.weights.adapters import adapter_config, assemble_adapter
from areal.weights.manifest import (
    ADAPTER_CONFIG,
    ADAPTER_FILE,
    SINGLE_FILE,
    AdapterInfo,
    PolicyVersion,
    WeightFile,
    WeightTensor,
    assemble_manifest,
    version_name,
)
from areal.weights.safetensors import HostTensor, Layout, plan_layout

# What a server may read beside the weights: tekken.json, tiktoken.model, chat_template.json too.
_COMPANIONS = ("*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt")
_MAX_THREADS = 4
_LEAST_S = 30.0
_SLOWEST_BYTES_PER_S = 64 << 20
_T = TypeVar("_T")
_R = TypeVar("_R")


class TransportError(ArealError):
    """A version could not be sent with this transport; the message says why. Another may work."""


class Again(Protocol):
    """Gathers a version's tensors again, on their device; in one thread."""

    def buckets(self) -> Generator[Sequence[tuple[str, Any]]]:
        """Runs of (name, torch tensor) in the order of `NewVersion.tensors`; once. Close it."""

    def skip(self) -> None:
        """Skips the buckets: the trainer may change its weights. Harmless after `buckets`."""


@dataclass(frozen=True)
class NewVersion:
    """A version to publish, in the trainer's memory.

    Example:
        >>> NewVersion(12, 3, (HostTensor("model.norm.weight", (128,), "F32", view),), model_dir)
    """

    version: int
    """Finished train steps."""
    incarnation: int
    tensors: tuple[HostTensor, ...]
    model: Path
    """Directory that config and tokenizer are copied from."""
    again: Again | None = None
    """What a broadcast sends instead of these bytes; None: these bytes."""
    adapter: AdapterInfo | None = None
    """Whether the tensors are an adapter's; None: they are whole weights."""

    @property
    def weights_file(self) -> str:
        """The name of its safetensors file."""
        return SINGLE_FILE if self.adapter is None else ADAPTER_FILE

    def small_file(self) -> tuple[str, bytes]:
        """Returns the name and the content of the file that says what the tensors are."""
        if self.adapter is None:
            return "config.json", (self.model / "config.json").read_bytes()
        return ADAPTER_CONFIG, adapter_config(self.adapter, [t.name for t in self.tensors])

    @property
    def name(self) -> str:
        """The name of its folder."""
        return version_name(self.version, self.incarnation)


class Publisher(Protocol):
    """Brings a version to where servers can get it."""

    name: str

    def publish(self, new: NewVersion, announce: Callable[[PolicyVersion], None]) -> PolicyVersion:
        """Sends the bytes, then announces the version; blocking.

        Raises:
            TransportError: This transport cannot send it.
            ArealError: `announce` was refused for another reason.
        """


def patience_s(size_bytes: int) -> float:
    """How long to wait for that many bytes to be transferred, or read and hashed, before giving up.

    30 s, plus a second for each 64 MiB: slower than any volume or network that is usable for
    training.
    """
    return _LEAST_S + size_bytes / _SLOWEST_BYTES_PER_S


def companions(model: Path) -> Iterator[Path]:
    """Yields a model folder's files of configurations, tokenizers and processors."""
    for pattern in _COMPANIONS:
        for file in sorted(model.glob(pattern)):
            left_out = file.name.endswith(".index.json") or file.name == "manifest.json"
            if file.is_file() and not left_out:
                yield file


def describe(new: NewVersion) -> tuple[PolicyVersion, Layout]:
    """Returns the manifest of a version in memory, and its file's layout."""
    layout = plan_layout(new.tensors)
    by_name = {tensor.name: tensor for tensor in new.tensors}
    names = [place.name for place in layout.places]
    digests = in_threads(lambda name: by_name[name].digest, names)
    return manifest_of(new, layout, dict(zip(names, digests, strict=True))), layout


def manifest_of(new: NewVersion, layout: Layout, digests: Mapping[str, str]) -> PolicyVersion:
    """Returns the manifest, from the tensors' digests by name."""
    weights = WeightFile(new.weights_file, layout.size_bytes, layout.file_digest(digests))
    tensors = [WeightTensor(p.name, p.shape, p.dtype, digests[p.name]) for p in layout.places]
    if new.adapter is not None:
        return assemble_adapter(
            new.model, new.version, new.incarnation, weights, tensors, new.adapter
        )
    return assemble_manifest(new.model, new.version, new.incarnation, [weights], tensors)


def pieces(new: NewVersion, layout: Layout, most: int) -> Iterator[memoryview]:
    """Yields the bytes of the file in order, in pieces of at most the given size; not copied."""
    yield memoryview(layout.header)
    tensors = {tensor.name: tensor.data for tensor in new.tensors}
    for place in layout.places:
        data = tensors[place.name]
        for start in range(0, data.nbytes, most):
            yield data[start : start + most]


def in_threads(work: Callable[[_T], _R], items: Iterable[_T]) -> list[_R]:
    """Returns `[work(item) for item in items]`, computed by a few threads: hashing frees the GIL.

    It uses one thread for each core that the process may use, at most four: more are limited by
    memory.
    """
    threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(threads, "weights") as pool:
        return list(pool.map(work, items))


def write_at(descriptor: int, data: memoryview, offset: int) -> None:
    """Writes all bytes; one system call writes at most 2 GiB."""
    while data.nbytes:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written
