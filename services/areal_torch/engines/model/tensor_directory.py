"""The weights of a Hugging Face directory, read tensor by tensor or box by box.

Files are read with offsets, not memory-mapped: pages of a mapped file would count as this process's
memory until another process needs it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from areal.errors import InvalidInput
from areal.weights.manifest import weight_files
from areal.weights.safetensors import TensorPlace, read_layout

Box = Sequence[slice]
"""A range with start and stop for each dimension."""

_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16,
    "I32": torch.int32, "I64": torch.int64, "F16": torch.float16, "BF16": torch.bfloat16,
    "F32": torch.float32, "F64": torch.float64, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


class TensorDirectory:
    """The weights of a Hugging Face directory; a context manager.

    Example:
        >>> with TensorDirectory(Path("runs/tiny")) as tensors:
        ...     norm = tensors.read("model.norm.weight")
        ...     rows = tensors.read("lm_head.weight", (slice(0, 64), slice(0, 128)))
    """

    def __init__(self, directory: Path) -> None:
        """Reads the headers.

        Raises:
            InvalidInput: The directory has no safetensors weights, or some are missing.
        """
        self.shapes: dict[str, tuple[int, ...]] = {}
        """The shape of every tensor."""
        self.dtypes: dict[str, str] = {}
        """The dtype of every tensor, as safetensors calls it."""
        self._places: dict[str, tuple[Path, TensorPlace]] = {}
        self._open: dict[Path, int] = {}
        self._closing = ExitStack()
        for file in weight_files(directory):
            for place in read_layout(file).places:
                self.shapes[place.name] = place.shape
                self.dtypes[place.name] = place.dtype
                self._places[place.name] = (file, place)

    def __enter__(self) -> Self:
        """Opens no file yet: each is opened when something is read from it."""
        return self

    def __exit__(self, *_: object) -> None:
        self._open.clear()
        self._closing.close()

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """Reads a tensor, or a box of it: on the CPU, contiguous, in the file's dtype.

        Args:
            name: The tensor's name.
            box: A range of each dimension; None: all of it.

        Raises:
            InvalidInput: torch does not have the dtype, or the file was truncated meanwhile.
        """
        file, place = self._places[name]
        dtype = _DTYPES.get(place.dtype)
        if dtype is None:
            raise InvalidInput(
                f"{file}: tensor {name!r} has dtype {place.dtype}; expected one of "
                f"{', '.join(_DTYPES)}"
            )
        box = [slice(0, size) for size in place.shape] if box is None else box
        out = torch.empty([part.stop - part.start for part in box], dtype=dtype)
        if not out.numel():
            return out
        memory = out.view(-1).view(torch.uint8).numpy().data
        filled = 0
        for first, count in _runs(place.shape, box):
            begin = place.begin + first * dtype.itemsize
            end = filled + count * dtype.itemsize
            while filled < end:
                read = os.preadv(self._descriptor(file), [memory[filled:end]], begin)
                if read == 0:
                    raise InvalidInput(f"{file}: ends within tensor {name!r}")
                filled += read
                begin += read
        return out

    def _descriptor(self, file: Path) -> int:
        if file not in self._open:
            self._open[file] = os.open(file, os.O_RDONLY)
            self._closing.callback(os.close, self._open[file])
        return self._open[file]


def _runs(shape: Sequence[int], box: Box) -> Iterator[tuple[int, int]]:
    """Yields (first element, number of elements) of contiguous parts of a row-major tensor."""
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    outer = len(shape)
    while outer and (box[outer - 1].stop - box[outer - 1].start) == shape[outer - 1]:
        outer -= 1
    # Dimensions from `outer` on are whole; the one before is a range that lies together with them.
    split = max(outer - 1, 0)
    count = math.prod(part.stop - part.start for part in box[split:])
    inner = sum(part.start * stride for part, stride in zip(box, strides, strict=True))
    origin = [part.start for part in box[:split]]
    for index in product(*(range(part.start, part.stop) for part in box[:split])):
        moved = ((at - start) * s for at, start, s in zip(index, origin, strides, strict=False))
        yield inner + sum(moved), count
