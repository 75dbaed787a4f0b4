"""A delta is not trusted: what it says of itself costs no memory."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import zstandard

from areal.errors import InvalidInput
from areal.weights import delta
from areal.weights.safetensors import HostTensor

BASE = "0" * 32


def tensor(values: np.ndarray) -> HostTensor:
    return HostTensor("w", values.shape, "F32", memoryview(values.view(np.uint8)))


def test_delta_when_a_frame_is_larger_than_its_tensor_then_refused_before_it_is_unpacked() -> None:
    before = np.zeros(1000, np.float32)
    after = before.copy()
    after[7] = 1.0
    raw = delta.encode([tensor(after)], {"w": before.tobytes()}, BASE)
    assert raw is not None
    frame = raw[raw.index(zstandard.FRAME_HEADER) :]
    bomb = zstandard.ZstdCompressor().compress(bytes(256 << 20))
    header = raw[8 : len(raw) - len(frame)].replace(
        f'"bytes":{len(frame)}'.encode(), f'"bytes":{len(bomb)}'.encode()
    )
    torn = delta.Delta(len(header).to_bytes(8, "little") + header + bomb)
    tracemalloc.start()
    try:
        with pytest.raises(InvalidInput, match="tensor w"):
            torn.apply("w", "F32", memoryview(bytearray(before.tobytes())))
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


def test_delta_when_it_names_a_position_twice_then_refused() -> None:
    before = np.zeros(1000, np.float32)
    after = before.copy()
    after[[7, 8]] = 1.0
    raw = delta.encode([tensor(after)], {"w": before.tobytes()}, BASE)
    assert raw is not None
    at = raw.index(zstandard.FRAME_HEADER)
    body = zstandard.ZstdDecompressor().decompress(raw[at:])
    gaps = np.frombuffer(body[:8], np.uint8).reshape(4, 2).copy()
    assert gaps[0].tolist() == [7, 1]
    gaps[0, 1] = 0  # the second position is the first one again
    frame = zstandard.ZstdCompressor().compress(gaps.tobytes() + body[8:])
    header = raw[8:at].replace(
        f'"bytes":{len(raw) - at}'.encode(), f'"bytes":{len(frame)}'.encode()
    )
    twice = delta.Delta(len(header).to_bytes(8, "little") + header + frame)
    data = bytearray(before.tobytes())
    told = "tensor w: positions outside of the tensor, or a position twice"
    with pytest.raises(InvalidInput, match=told):
        twice.apply("w", "F32", memoryview(data))
    assert bytes(data) == before.tobytes(), "nothing was changed"
