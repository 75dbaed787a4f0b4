"""Groups under way and at rest: zstd frames, except where they are too small for it to pay.

A worker packs a group once; the ledger checks it and keeps these bytes, and a trainer gets them.
A reader tells by the first bytes: a zstd frame begins with its magic number, and no
TrajectoryGroup does (it would be a field 5 of the kind "number", which there is not).
"""

from __future__ import annotations

import zstandard

from areal.errors import InvalidInput

MAX_GROUP_BYTES = 64 * 1024 * 1024
"""A finished group larger than this is refused. As it travels, compressed, 90 MiB are the most that
a message holds."""
_MAGIC = b"\x28\xb5\x2f\xfd"
# Below, the record around the group weighs more than what would be saved.
MIN_BYTES = 512
# Higher levels take longer, also to expand, and save little: tools/bench/compression.py.
_LEVEL = -1
# What any message may have.
_MAX_BYTES = 128 * 1024 * 1024


class GroupCodec:
    """Zstd with its working memory kept: making that again costs more than a group does.

    Not for two threads at once.
    """

    def __init__(self) -> None:
        self._compressor = zstandard.ZstdCompressor(level=_LEVEL)
        self._decompressor = zstandard.ZstdDecompressor()

    def compress(self, payload: bytes) -> bytes:
        """A serialized group as it is sent and stored."""
        return payload if len(payload) < MIN_BYTES else self._compressor.compress(payload)

    def expand(self, stored: bytes, max_bytes: int = _MAX_BYTES) -> bytes:
        """The serialized group.

        Raises:
            InvalidInput: It is a broken frame, or (nothing is allocated before that is known)
                larger than max_bytes.
        """
        if not stored.startswith(_MAGIC):
            size, payload = len(stored), stored
        else:
            try:
                size = zstandard.frame_content_size(stored)
                if size < 0:
                    raise InvalidInput("group: a zstd frame that does not say its size")
                if size <= max_bytes:
                    payload = self._decompressor.decompress(stored, allow_extra_data=False)
            except zstandard.ZstdError as error:
                raise InvalidInput(f"group: not a zstd frame ({error})") from None
        if size > max_bytes:
            raise InvalidInput(f"group has {size} bytes: at most {max_bytes}")
        return payload


def compress(payload: bytes) -> bytes:
    """One group, once."""
    return GroupCodec().compress(payload)


def expand(stored: bytes, max_bytes: int = _MAX_BYTES) -> bytes:
    """One group, once; raises InvalidInput."""
    return GroupCodec().expand(stored, max_bytes)
