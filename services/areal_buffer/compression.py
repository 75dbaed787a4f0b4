"""Groups at rest: zstd frames, except where they are too small for it to pay.

A reader tells by the first bytes: a zstd frame begins with its magic number, and no
TrajectoryGroup does (it would be a field 5 of the kind "number", which there is not).
"""

from __future__ import annotations

import zstandard

_MAGIC = b"\x28\xb5\x2f\xfd"
# Below, the record around the group weighs more than what would be saved.
MIN_BYTES = 512
# Higher levels take longer and save 2 %: tools/bench/compression.py.
_LEVEL = 1


def compress(payload: bytes) -> bytes:
    """A serialized group as it is stored."""
    if len(payload) < MIN_BYTES:
        return payload
    return zstandard.ZstdCompressor(level=_LEVEL).compress(payload)


def expand(stored: bytes) -> bytes:
    """The serialized group of a stored one."""
    if not stored.startswith(_MAGIC):
        return stored
    return zstandard.ZstdDecompressor().decompress(stored)
