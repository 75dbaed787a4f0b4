"""What changed between two versions: an encoding, exact to the bit.

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
import struct
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

import numpy as np
import zstandard
from numpy.typing import NDArray

from areal.errors import InvalidInput
from areal.weights.publisher import in_threads
from areal.weights.safetensors import HostTensor, item_bytes

FILE = "delta.bin"
PAYS_BELOW = 0.5
"""A delta larger than this part of the full size is not worth the second step."""
_DENSE_ABOVE = 0.5
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
    """One changed tensor."""

    name: str
    changed: int
    """Elements."""
    dense: bool
    frame: bytes


def encode(
    new: Sequence[HostTensor], base: Mapping[str, bytes | memoryview], base_digest: str
) -> bytes | None:
    """The delta from `base` to `new`; None when it does not pay.

    Args:
        new: Of the new version.
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
    """A delta as it came; nothing of it is trusted before it is checked.

    Raises:
        InvalidInput: Not a delta, truncated, or padded.
    """

    def __init__(self, raw: bytes) -> None:
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
                raise ValueError("positions outside of the tensor, or twice the same")
            words[where] ^= _unplanes(raw[4 * changed :], changed, width)
        except (ValueError, zstandard.ZstdError) as error:
            raise InvalidInput(f"{FILE}: tensor {name}: {error}") from None


def _words(data: bytes | memoryview, dtype: str) -> Words:
    width = item_bytes(dtype) or 1
    return np.frombuffer(data, dtype=_WORDS[min(width, 8)])


def _planes(words: Words) -> bytes:
    """First bytes of all words, then second bytes, …: alike bytes stand together."""
    return np.ascontiguousarray(words.view(np.uint8).reshape(words.size, -1).T).tobytes()


def _unplanes(raw: bytes, count: int, width: int) -> Words:
    planes = np.frombuffer(raw, np.uint8).reshape(width, count)
    return np.ascontiguousarray(planes.T).view(_WORDS[width]).reshape(count)
