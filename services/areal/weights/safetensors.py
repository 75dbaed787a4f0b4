"""safetensors files without torch: their layout, their bytes, and digests of both.

A digest is xxh3-128 (hex). It says whether bytes are the ones that were published: torn, swapped
and stale files are caught at memory speed (sha256 takes seven times as long). It does not keep out
somebody who can write to the volume; the bearer token and the volume's rights do that.

The digest of a safetensors file is made of its header and of its tensors' digests, in the order of
the file, so one pass over the bytes gives both, and tensors in the wrong place change it.
"""

from __future__ import annotations

import json
import math
import mmap
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import xxhash

from areal.errors import InvalidInput

SUFFIX = ".safetensors"
_BLOCK_BYTES = 1 << 20
MAX_HEADER_BYTES = 100 * 1024 * 1024
_ITEM_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip


@dataclass(frozen=True)
class HostTensor:
    """One tensor in this process's memory, as bytes.

    Example:
        >>> HostTensor("model.norm.weight", (128,), "F32", memoryview(array).cast("B"))
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    """safetensors' name: F32, BF16, F16, F64."""
    data: memoryview
    """Contiguous, row-major."""
    known_digest: str = ""
    """xxh3-128 of the data, if it was computed while the data was gathered; empty: not yet."""

    @property
    def digest(self) -> str:
        """The xxh3-128 of the data, in hex."""
        return self.known_digest or digest_of(self.data)


@dataclass(frozen=True)
class TensorPlace:
    """The position of a tensor in a file."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    begin: int
    """Position of the first byte in the file."""
    end: int


@dataclass(frozen=True)
class Layout:
    """A safetensors file without its tensors' bytes."""

    header: bytes
    """The header, including the eight bytes of length before it."""
    places: tuple[TensorPlace, ...]
    """Places of the tensors in the order of the file, without gaps."""

    @property
    def size_bytes(self) -> int:
        """The size of the whole file."""
        return self.places[-1].end if self.places else len(self.header)

    def file_digest(self, digests: Mapping[str, str]) -> str:
        """Returns the digest of the file, from its tensors' digests by name."""
        whole = xxhash.xxh3_128(self.header)
        for place in self.places:
            whole.update(f"{digests[place.name]}\n".encode())
        return whole.hexdigest()


def digest_of(data: bytes | bytearray | memoryview | mmap.mmap) -> str:
    """Returns the xxh3-128 in hex; releases the GIL while it works."""
    return xxhash.xxh3_128(data).hexdigest()


def item_bytes(dtype: str) -> int:
    """Bytes of one element; dtypes below a byte count as none."""
    return _ITEM_BITS[dtype] // 8


def plan_layout(tensors: Iterable[HostTensor]) -> Layout:
    """Returns the layout of Hugging Face's own writer: widest elements first, then by name."""
    ordered = sorted(tensors, key=lambda t: (-_ITEM_BITS[t.dtype], t.name))
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in ordered:
        end = offset + tensor.data.nbytes
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return parse_header(struct.pack("<Q", len(text)) + text, "header")


def header_length(prefix: bytes, where: object) -> int:
    """Returns the length of the header with its prefix, from a file's first eight bytes."""
    length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
    if not 2 <= length <= MAX_HEADER_BYTES:
        raise InvalidInput(f"{where}: not a safetensors file (header of {length} bytes)")
    return 8 + int(length)


def parse_header(raw: bytes, where: object) -> Layout:
    """Checks a header completely: every later read can trust its offsets.

    Args:
        raw: The header with the eight bytes of its length.
        where: The file, for errors.

    Raises:
        InvalidInput: Not safetensors, an unknown dtype, offsets that overlap, leave holes or do
            not fit the shape.
    """
    try:
        header = json.loads(raw[8:])
        header.pop("__metadata__", None)
        places = []
        for name, entry in header.items():
            begin, end = (len(raw) + int(n) for n in entry["data_offsets"])
            shape = tuple(int(n) for n in entry["shape"])
            if (
                min(shape, default=0) < 0
                or end - begin != (math.prod(shape) * _ITEM_BITS[entry["dtype"]] + 7) // 8
            ):
                raise InvalidInput(f"{where}: tensor {name}: offsets do not fit its shape")
            places.append(TensorPlace(name, shape, entry["dtype"], begin, end))
    except (
        ArithmeticError,
        AttributeError,
        KeyError,
        RecursionError,
        TypeError,
        ValueError,
    ) as error:
        raise InvalidInput(f"{where}: not a safetensors file ({error})") from None
    places.sort(key=lambda place: (place.begin, place.end))
    offset = len(raw)
    for place in places:
        if place.begin != offset:
            raise InvalidInput(f"{where}: tensor {place.name}: a hole or an overlap before it")
        offset = place.end
    return Layout(raw, tuple(places))


def read_layout(file: Path) -> Layout:
    """Returns the layout of a file that holds all its bytes.

    Raises:
        InvalidInput: The file cannot be read, is not safetensors, or is truncated or padded.
    """
    try:
        with file.open("rb") as stream:
            prefix = stream.read(8)
            raw = prefix + stream.read(header_length(prefix, file) - 8)
            size = stream.seek(0, 2)
    except OSError as error:
        raise InvalidInput(f"{file}: {error.strerror}") from None
    layout = parse_header(raw, file)
    if size != layout.size_bytes:
        raise InvalidInput(f"{file}: {size} bytes, expected {layout.size_bytes}: truncated or torn")
    return layout


def tensor_digests(file: Path, layout: Layout) -> dict[str, str]:
    """Returns each tensor's digest by name; raises InvalidInput when the file cannot be read."""
    if not layout.places:
        return {}
    try:
        with file.open("rb") as stream:
            mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{file}: {error}") from None
    with mapped, memoryview(mapped) as view:
        digests = {}
        for place in layout.places:
            with view[place.begin : place.end] as part:
                digests[place.name] = digest_of(part)
    return digests


def file_digest(file: Path) -> str:
    """Returns the digest of any file of a version; raises InvalidInput when it cannot be read."""
    if file.suffix == SUFFIX:
        layout = read_layout(file)
        return layout.file_digest(tensor_digests(file, layout))
    whole = xxhash.xxh3_128()
    try:
        with file.open("rb") as stream:
            while block := stream.read(_BLOCK_BYTES):
                whole.update(block)
        return whole.hexdigest()
    except OSError as error:
        raise InvalidInput(f"{file}: {error.strerror}") from None
