"""Where a server's weights come from: a folder, a weight store over HTTP, or an object store.

Both give every tensor's place first, so that names, shapes and types are checked before a byte is
read, and then its bytes, one tensor at a time into memory that is used again. With a manifest each
tensor's digest is checked by its reader (`weights.load_weights`). Where a version was
published as what changed since the one that this server holds, only that is read (`DeltaSource`).
"""

from __future__ import annotations

import math
import mmap
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from areal.config.transports import is_fetched
from areal.errors import InvalidInput
from areal.weights.broadcast import runs
from areal.weights.delta import FILE, Delta, open_delta
from areal.weights.manifest import MANIFEST, PolicyVersion, read_manifest, weight_files
from areal.weights.objects import ObjectStore, open_remote
from areal.weights.safetensors import (
    SUFFIX,
    Layout,
    TensorPlace,
    header_length,
    item_bytes,
    parse_header,
    read_layout,
)
from areal.weights.store_client import CHUNK_BYTES, StoreConnection
from areal_inference.model.config import ModelError


class WeightError(ModelError):
    """A source does not hold exactly this model's tensors; names the tensor."""


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor of a source."""

    file: str
    place: TensorPlace
    digest: str
    """The version's digest; empty: the source has no manifest."""


@dataclass(frozen=True, slots=True)
class Published:
    """A version as it was pulled: what its files are, so that the next server can pull it here."""

    name: str
    """Name of the version's folder."""
    manifest: PolicyVersion
    layouts: Mapping[str, Layout]
    """Layouts of its safetensors files."""


class Source(Protocol):
    """Tensors by name; close it after use."""

    tensors: dict[str, Stored]

    def read(self, stored: Stored) -> memoryview:
        """Returns a tensor's bytes, writable, valid until this thread reads the next one."""

    def together(self, names: Iterable[str]) -> list[list[str]]:
        """Returns the tensors in reading order, grouped by what one thread reads together."""

    def close(self) -> None:
        """Closes files and connections."""


def open_source(location: str, headers: Mapping[str, str]) -> Source:
    """Opens a folder's path, or a location that `open_remote` knows.

    Raises:
        WeightError: There is no complete set of safetensors files.
        TransportError: The store is away, or refuses.
    """
    try:
        if is_fetched(location):
            return StoreSource(location, headers)
        return FolderSource(Path(location))
    except InvalidInput as error:
        raise WeightError(str(error)) from None


class FolderSource:
    """safetensors files, mapped into memory."""

    def __init__(self, folder: Path) -> None:
        self._files = ExitStack()
        self._mapped: dict[str, mmap.mmap] = {}
        layouts = {}
        for file in weight_files(folder):
            layouts[file.name] = read_layout(file)
            try:
                with file.open("rb") as stream:
                    mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
            except (OSError, ValueError) as error:
                raise WeightError(f"{file}: {error}") from None
            self._mapped[file.name] = self._files.enter_context(mapped)
        manifest = read_manifest(folder) if (folder / MANIFEST).is_file() else None
        self.tensors = _collect(layouts, manifest, folder)

    def read(self, stored: Stored) -> memoryview:
        """See `Source`; nothing is copied."""
        return memoryview(self._mapped[stored.file])[stored.place.begin : stored.place.end]

    def together(self, names: Iterable[str]) -> list[list[str]]:
        """See `Source`: each by itself, the largest first."""
        return one_by_one(self, names)

    def close(self) -> None:
        """Unmaps the files from memory."""
        # While a tensor still looks into a file it stays mapped.
        with suppress(BufferError):
            self._files.close()


class StoreSource:
    """Ranges of a store's files, a connection and a buffer for each thread that reads.

    A request brings neighbors in a file, up to CHUNK_BYTES: a model has hundreds of small tensors.
    """

    def __init__(self, location: str, headers: Mapping[str, str]) -> None:
        self._location = location
        self._headers = headers
        self._lanes = threading.local()
        self._open: list[StoreConnection | ObjectStore] = []
        store, self._name = self._connection()
        manifest = store.manifest(self._name)
        layouts = {
            file.name: self._layout(file.name)
            for file in manifest.files
            if file.name.endswith(SUFFIX)
        }
        self.published = Published(self._name, manifest, layouts)
        self.tensors = _collect(layouts, manifest, location)
        self._pieces = {
            place.name: (file, run[0].begin, run[-1].end)
            for file, layout in layouts.items()
            for run in runs(layout.places, lambda place: place.end - place.begin, CHUNK_BYTES)
            for place in run
        }

    def read(self, stored: Stored) -> memoryview:
        """See `Source`; the buffer is this thread's own and grows to the largest piece."""
        piece = self._pieces[stored.place.name]
        file, begin, end = piece
        buffer: bytearray | None = getattr(self._lanes, "buffer", None)
        if buffer is None or len(buffer) < end - begin:
            self._lanes.buffer = buffer = bytearray(end - begin)
            self._lanes.piece = None
        target = memoryview(buffer)
        if getattr(self._lanes, "piece", None) != piece:
            self._lanes.piece = None
            store = self._connection()[0]
            for at in range(begin, end, CHUNK_BYTES):  # a tensor may be larger than one range
                part = target[at - begin : min(at + CHUNK_BYTES, end) - begin]
                store.read_into(self._name, file, at, part)
            self._lanes.piece = piece
        return target[stored.place.begin - begin : stored.place.end - begin]

    def together(self, names: Iterable[str]) -> list[list[str]]:
        """See `Source`: neighbors in a file, as many as one request brings."""
        wanted = set(names)
        found: dict[tuple[str, int, int], list[str]] = {}
        for name, piece in self._pieces.items():
            if name in wanted:
                found.setdefault(piece, []).append(name)
        return [found[piece] for piece in sorted(found, key=lambda p: p[1] - p[2])]

    def close(self) -> None:
        """Closes every connection to the giver."""
        for connection in self._open:
            connection.close()

    def _layout(self, file: str) -> Layout:
        connection, where = self._connection()[0], f"{self._location}/{file}"
        prefix = bytearray(8)
        connection.read_into(self._name, file, 0, memoryview(prefix))
        raw = bytearray(header_length(bytes(prefix), where))
        connection.read_into(self._name, file, 0, memoryview(raw))
        return parse_header(bytes(raw), where)

    def _connection(self) -> tuple[StoreConnection | ObjectStore, str]:
        found: tuple[StoreConnection | ObjectStore, str] | None
        found = getattr(self._lanes, "connection", None)
        if found is None:
            found = self._lanes.connection = open_remote(self._location, self._headers)
            self._open.append(found[0])
        return found


class DeltaSource:
    """The weights that this server holds, with what changed since.

    Args:
        manifest: Manifest of the new version.
        delta: Delta from the held weights to the new version.
        held: A copy of a held tensor's bytes, writable.
    """

    def __init__(
        self, manifest: PolicyVersion, delta: Delta, held: Callable[[str], memoryview]
    ) -> None:
        self._delta, self._held = delta, held
        self.tensors = {}
        for tensor in manifest.tensors:
            size = math.prod(tensor.shape) * item_bytes(tensor.dtype)
            place = TensorPlace(tensor.name, tensor.shape, tensor.dtype, 0, size)
            if not tensor.digest:
                raise InvalidInput(f"{FILE}: tensor {tensor.name} cannot be checked: no digest")
            self.tensors[tensor.name] = Stored(FILE, place, tensor.digest)
        delta.check_names(self.tensors.keys(), "its manifest")

    def read(self, stored: Stored) -> memoryview:
        """See `Source`."""
        data = self._held(stored.place.name)
        if data.nbytes != stored.place.end:
            raise InvalidInput(
                f"{FILE}: tensor {stored.place.name} has a different dtype from the server's"
            )
        self._delta.apply(stored.place.name, stored.place.dtype, data)
        return data

    def together(self, names: Iterable[str]) -> list[list[str]]:
        """See `Source`: each by itself, the largest first."""
        return one_by_one(self, names)

    def close(self) -> None:
        """Does nothing: no file is open."""


def open_changes(
    location: str,
    headers: Mapping[str, str],
    digest: Callable[[], str],
    held: Callable[[str], memoryview],
) -> DeltaSource | None:
    """Opens a version as its changes since the held one; None: it was not published as such.

    Args:
        location: As for `open_source`.
        headers: The weight store's.
        digest: `PolicyVersion.digest` of the held weights.
        held: See `DeltaSource`.

    Raises:
        InvalidInput: The delta is damaged.
        TransportError: The store is away, or refuses.
    """
    if not is_fetched(location):
        folder = Path(location)
        if not (folder / MANIFEST).is_file():
            return None
        manifest = read_manifest(folder)
        if manifest.delta is None or manifest.delta.base_digest != digest():
            return None
        try:
            raw = (folder / FILE).read_bytes()
        except OSError as error:
            raise InvalidInput(f"{folder / FILE}: {error.strerror}") from None
        return DeltaSource(manifest, open_delta(raw, manifest.delta), held)
    store, name = open_remote(location, headers)
    with store:
        manifest = store.manifest(name)
        wanted = manifest.delta
        if wanted is None or wanted.base_digest != digest():
            return None
        if not 0 < wanted.size_bytes <= manifest.size_bytes:
            raise InvalidInput(
                f"{location}: a delta of {wanted.size_bytes} bytes, "
                f"expected 1 to {manifest.size_bytes}"
            )
        buffer = bytearray(wanted.size_bytes)
        store.read_into(name, FILE, 0, memoryview(buffer))
    return DeltaSource(manifest, open_delta(buffer, wanted), held)


def one_by_one(source: Source, names: Iterable[str]) -> list[list[str]]:
    """Implements `Source.together` for sources where reading neighbors at once gains nothing."""
    places = {name: source.tensors[name].place for name in names}
    return [[n] for n in sorted(places, key=lambda n: places[n].begin - places[n].end)]


def _collect(
    layouts: Mapping[str, Layout], manifest: PolicyVersion | None, where: object
) -> dict[str, Stored]:
    digests = {t.name: t.digest for t in manifest.tensors} if manifest else {}
    tensors: dict[str, Stored] = {}
    for file, layout in layouts.items():
        for place in layout.places:
            if place.name in tensors:
                raise WeightError(f"{where}: tensor {place.name} is in two files")
            tensors[place.name] = Stored(file, place, digests.get(place.name, ""))
    return tensors
