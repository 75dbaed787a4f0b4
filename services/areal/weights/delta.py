"""Encodes the difference between two versions, exact to the bit.

Only elements whose bits differ are stored: their positions, as gaps, and the exclusive-or of the
new bits with the old ones. Both are split into byte planes (a small gap has three zero bytes, a
small step leaves sign and exponent alone) and compressed with zstd. A tensor of which most elements
changed is stored without positions. Unchanged tensors cost nothing.

    delta.bin = length of the header (8 bytes), header (JSON), one zstd frame per changed tensor
    header    = {"base": digest of the base, "tensors": [{"name", "changed", "dense", "bytes"}, …]}

Element width is that of the dtype (2 for BF16, 4 for F32), so nothing is interpreted as a number.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import zstandard
from numpy.typing import NDArray

from areal.errors import InvalidInput
from areal.weights.manifest import (
    SINGLE_FILE,
    SPARE,
    DeltaFile,
    PolicyVersion,
    parse_version_dir,
    read_manifest,
)
from areal.weights.publisher import NewVersion, in_threads, write_at
from areal.weights.safetensors import HostTensor, TensorPlace, digest_of, item_bytes, read_layout

FILE = "delta.bin"
PAYS_BELOW = 0.5
"""A delta larger than this part of the full size is not worth the second step."""
_DENSE_ABOVE = 0.5
_PARTIAL = ".partial"
_LEVEL = 1
_MAX_HEADER_BYTES = 16 << 20
_WORDS: dict[int, type[np.unsignedinteger]] = {
    1: np.uint8,
    2: np.uint16,
    4: np.uint32,
    8: np.uint64,
}

Words = NDArray[np.unsignedinteger]


@dataclass(frozen=True)
class _Entry:
    """One changed tensor of a delta."""

    name: str
    changed: int
    """Number of changed elements."""
    dense: bool
    frame: bytes


def encode(
    new: Sequence[HostTensor], base: Mapping[str, bytes | memoryview], base_digest: str
) -> bytes | None:
    """Returns the delta from `base` to `new`; None if it would not be small enough to help.

    Args:
        new: Tensors of the new version.
        base: Bytes of the same tensors in the base version.
        base_digest: `PolicyVersion.digest` of it.
    """
    found = in_threads(lambda tensor: _encode_tensor(tensor, base[tensor.name]), new)
    entries = [entry for entry in found if entry is not None]
    header = json.dumps(
        {
            "base": base_digest,
            "tensors": [
                {"name": e.name, "changed": e.changed, "dense": e.dense, "bytes": len(e.frame)}
                for e in entries
            ],
        },
        separators=(",", ":"),
    ).encode()
    delta = b"".join([struct.pack("<Q", len(header)), header, *(e.frame for e in entries)])
    return delta if len(delta) <= PAYS_BELOW * sum(t.data.nbytes for t in new) else None


def _encode_tensor(tensor: HostTensor, base: bytes | memoryview) -> _Entry | None:
    words = _words(tensor.data, tensor.dtype)
    before = _words(base, tensor.dtype)
    difference = words ^ before
    where = np.flatnonzero(difference)
    if not where.size:
        return None
    dense = where.size > _DENSE_ABOVE * words.size
    if dense:
        raw = _planes(difference)
    else:
        gaps = np.diff(where, prepend=0).astype(np.uint32)
        if int(where[-1]) >= 2**32:
            gaps, dense = gaps[:0], True
        raw = _planes(difference) if dense else _planes(gaps) + _planes(difference[where])
    frame = zstandard.ZstdCompressor(level=_LEVEL).compress(raw)
    return _Entry(tensor.name, int(where.size), dense, frame)


class Delta:
    """A received delta; it is checked before it is used.

    Raises:
        InvalidInput: Not a delta, truncated, or padded.
    """

    def __init__(self, raw: bytes | bytearray) -> None:
        self._raw = raw
        try:
            length = struct.unpack("<Q", raw[:8])[0]
            if length > _MAX_HEADER_BYTES:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(raw[8 : 8 + length])
            self.base_digest = str(header["base"])
            self._entries: dict[str, tuple[int, bool, int, int]] = {}
            offset = 8 + length
            for entry in header["tensors"]:
                size = int(entry["bytes"])
                self._entries[str(entry["name"])] = (
                    int(entry["changed"]), bool(entry["dense"]), offset, offset + size,
                )  # fmt: skip
                offset += size
        except (struct.error, ValueError, KeyError, TypeError) as error:
            raise InvalidInput(f"{FILE}: not a delta ({error})") from None
        if offset != len(raw):
            raise InvalidInput(f"{FILE}: {len(raw)} bytes, expected {offset}: truncated or torn")

    def check_names(self, known: Set[str], where: str) -> None:
        """Raises InvalidInput when a tensor is not among those that `where` has."""
        unknown = self._entries.keys() - known
        if unknown:
            raise InvalidInput(f"{FILE}: tensor {min(unknown)} is unknown to {where}")

    def changed(self) -> int:
        """Elements that differ, over all tensors."""
        return sum(entry[0] for entry in self._entries.values())

    def apply(self, name: str, dtype: str, data: memoryview) -> None:
        """Turns a tensor's old bytes into its new ones, in place.

        Raises:
            InvalidInput: The delta does not fit this tensor.
        """
        if name not in self._entries:
            return
        changed, dense, begin, end = self._entries[name]
        words = _words(data, dtype)
        width = words.dtype.itemsize
        count = words.size if dense else changed
        size = words.nbytes if dense else changed * (4 + width)
        try:
            if not 0 < changed <= words.size:
                raise ValueError(f"{changed} of {words.size} elements")
            frame = self._raw[begin:end]
            # Before it is unpacked: what a frame says here is allocated.
            if (found := zstandard.frame_content_size(frame)) != size:
                raise ValueError(f"{found} bytes, expected {size}")
            raw = zstandard.ZstdDecompressor().decompress(frame)
            if dense:
                words ^= _unplanes(raw, count, width)
                return
            gaps = _unplanes(raw[: 4 * changed], changed, 4)
            where = np.cumsum(gaps, dtype=np.uint64)
            if int(where[-1]) >= words.size or not (gaps[1:] > 0).all():
                raise ValueError("positions outside of the tensor, or a position twice")
            words[where] ^= _unplanes(raw[4 * changed :], changed, width)
        except (ValueError, zstandard.ZstdError) as error:
            raise InvalidInput(f"{FILE}: tensor {name}: {error}") from None


def _words(data: bytes | memoryview, dtype: str) -> Words:
    width = item_bytes(dtype) or 1
    return np.frombuffer(data, dtype=_WORDS[min(width, 8)])


def _planes(words: Words) -> bytes:
    """Reorders bytes (first ones of all words, then second ones, …), so that alike ones adjoin."""
    return np.ascontiguousarray(words.view(np.uint8).reshape(words.size, -1).T).tobytes()


def _unplanes(raw: bytes, count: int, width: int) -> Words:
    planes = np.frombuffer(raw, np.uint8).reshape(width, count)
    return np.ascontiguousarray(planes.T).view(_WORDS[width]).reshape(count)


def complete(folder: Path, wanted: DeltaFile) -> None:
    """Completes a published folder that has only a delta; does nothing if it is complete; blocking.

    Even if this process is killed, the folder is complete or has no `model.safetensors`.

    Args:
        folder: Published; its base lies beside it.
        wanted: The delta's description in the manifest.

    Raises:
        InvalidInput: The base is not there or another one, the delta is damaged, or the volume is
            full.
    """
    if (folder / SINGLE_FILE).exists():
        return
    base = folder.parent / wanted.base
    names = [parse_version_dir(name) for name in (folder.name, wanted.base)]
    if None in names or not (base / SINGLE_FILE).is_file():
        raise InvalidInput(f"{FILE}: its base {wanted.base[:80]!r} is not in {folder.parent}")
    try:
        with suppress(OSError):  # its pages are there already
            (folder.parent / SPARE / SINGLE_FILE).rename(folder / _PARTIAL)
        rebuild(folder, base, wanted, name=_PARTIAL)
        (folder / _PARTIAL).rename(folder / SINGLE_FILE)
    except OSError as error:
        raise InvalidInput(f"{folder}: {error.strerror or error}") from None


def rebuild(folder: Path, base: Path, wanted: DeltaFile, *, name: str = SINGLE_FILE) -> None:
    """Writes the whole file into a folder that has the delta; blocking.

    The publisher or the loader checks the result; this only checks that the delta fits its base.

    Args:
        folder: Has `delta.bin`.
        base: Folder of the version that the delta starts from.
        wanted: The delta's description in the manifest.
        name: The file's name; an existing file is overwritten.

    Raises:
        InvalidInput: The base is not the delta's base, or the delta does not fit it.
    """
    delta = open_delta((folder / FILE).read_bytes(), wanted)
    found = read_manifest(base).digest
    if found != delta.base_digest:
        raise InvalidInput(
            f"{FILE}: based on weights {delta.base_digest[:16]}…, but "
            f"{base.name} holds {found[:16]}…"
        )
    layout = read_layout(base / SINGLE_FILE)
    delta.check_names({place.name for place in layout.places}, base.name)
    held = np.memmap(base / SINGLE_FILE, np.uint8, "r")
    target = os.open(folder / name, os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        os.ftruncate(target, layout.size_bytes)
        write_at(target, memoryview(layout.header), 0)

        def apply(place: TensorPlace) -> None:
            data = np.array(held[place.begin : place.end])
            delta.apply(place.name, place.dtype, data.data)
            write_at(target, data.data, place.begin)

        in_threads(apply, layout.places)
    finally:
        os.close(target)


def open_delta(raw: bytes | bytearray, wanted: DeltaFile) -> Delta:
    """Opens the delta that a manifest names.

    Raises:
        InvalidInput: It is another one, truncated or damaged.
    """
    if len(raw) != wanted.size_bytes:
        raise InvalidInput(f"{FILE}: {len(raw)} bytes, expected {wanted.size_bytes}: truncated")
    found = digest_of(raw)
    if found != wanted.digest:
        raise InvalidInput(f"{FILE}: digest {found[:16]}…, expected {wanted.digest[:16]}…")
    delta = Delta(raw)
    if delta.base_digest != wanted.base_digest:
        raise InvalidInput(
            f"{FILE}: based on weights {delta.base_digest[:16]}…, expected "
            f"{wanted.base_digest[:16]}…"
        )
    return delta


class DeltaChain:
    """Holds the base of the next delta, which is a copy of the model; all transports share one.

    A trainer that has just started has no base, so its first version is sent whole. So is a version
    whose base the other side has lost, and one whose delta would save too little.
    """

    def __init__(self) -> None:
        self._before: tuple[PolicyVersion, NewVersion] | None = None

    def encode(self, new: NewVersion) -> tuple[DeltaFile, bytes] | None:
        """Returns the delta to `new` and its description; None: send the whole version."""
        if self._before is None:
            return None
        base, before = self._before
        if _kinds(before) != _kinds(new):
            return None
        held = {tensor.name: tensor.data for tensor in before.tensors}
        raw = encode(new.tensors, held, base.digest)
        if raw is None:
            return None
        return DeltaFile(base.folder_name, base.digest, len(raw), digest_of(raw)), raw

    def advance(self, manifest: PolicyVersion, new: NewVersion) -> None:
        """Records that `new` was published: the next delta starts from it."""
        self._before = manifest, new


def _kinds(version: NewVersion) -> dict[str, tuple[tuple[int, ...], str]]:
    return {tensor.name: (tensor.shape, tensor.dtype) for tensor in version.tensors}
