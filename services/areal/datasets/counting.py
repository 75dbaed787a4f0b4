"""Pictures of squares to count: a task that a tiny vision model learns within minutes."""

from __future__ import annotations

import random
import struct
import zlib
from typing import Any

from areal.errors import InvalidInput

_SIDE, _SQUARE = 16, 3
_DARK, _BRIGHT = (24, 24, 32), (240, 220, 120)


def counting(count: int, *, most: int, seed: int) -> list[dict[str, Any]]:
    """Returns rows for vision models: each asks how many bright squares its picture shows.

    The squares do not touch each other. The field `images` is a list with one PNG file, as bytes.

    Args:
        count: Number of rows.
        most: Maximum number of squares in a picture, 1 to 5. The minimum is always 0.
        seed: Random seed.

    Raises:
        InvalidInput: `most` is not between 1 and 5, or `count` is negative.

    Example:
        >>> counting(1, most=2, seed=0)[0].keys()
        dict_keys(['prompt', 'images', 'answer'])
    """
    if not 1 <= most <= 5 or count < 0:
        raise InvalidInput(
            f"counting(count={count}, most={most}): expected most from 1 to 5, and count 0 or more"
        )
    generator = random.Random(f"counting:{seed}")  # noqa: S311 - problems, not secrets
    rows = []
    for _ in range(count):
        number = generator.randint(0, most)
        image = _picture(_corners(number, generator))
        rows.append({"prompt": "squares?", "images": [image], "answer": str(number)})
    return rows


def _corners(number: int, generator: random.Random) -> list[tuple[int, int]]:
    corners: list[tuple[int, int]] = []
    while len(corners) < number:
        x, y = (generator.randint(1, _SIDE - _SQUARE - 1) for _ in "xy")
        if all(max(abs(x - a), abs(y - b)) > _SQUARE for a, b in corners):
            corners.append((x, y))
    return corners


def _picture(corners: list[tuple[int, int]]) -> bytes:
    bright = {
        (x + right, y + down)
        for x, y in corners
        for right in range(_SQUARE)
        for down in range(_SQUARE)
    }
    lines = [
        bytes(v for x in range(_SIDE) for v in (_BRIGHT if (x, y) in bright else _DARK))
        for y in range(_SIDE)
    ]
    return _png(lines)


def _png(lines: list[bytes]) -> bytes:
    """A file of RGB lines, 8 bits a color."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        sum_ = zlib.crc32(kind + data)
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", sum_)

    header = struct.pack(">IIBBBBB", len(lines[0]) // 3, len(lines), 8, 2, 0, 0, 0)
    data = zlib.compress(b"".join(b"\0" + line for line in lines))
    parts = (chunk(b"IHDR", header), chunk(b"IDAT", data), chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)
