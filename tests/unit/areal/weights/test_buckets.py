"""How tensors are divided for a broadcast."""

from __future__ import annotations

import pytest

from areal.errors import InvalidInput
from areal.weights import broadcast
from areal.weights.broadcast import buckets
from areal.weights.manifest import WeightTensor


def sizes(monkeypatch: pytest.MonkeyPatch, *elements: int) -> list[list[int]]:
    """Elements by bucket, of F32 tensors where a bucket holds 40 bytes."""
    monkeypatch.setattr(broadcast, "BUCKET_BYTES", 40)
    tensors = [WeightTensor(f"t{at}", (count,), "F32") for at, count in enumerate(elements)]
    divided = list(buckets(tensors))
    assert [tensor for bucket in divided for tensor in bucket] == tensors
    return [[tensor.shape[0] for tensor in bucket] for bucket in divided]


def test_buckets_when_tensors_are_small_then_each_is_as_full_as_it_may_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert sizes(monkeypatch, *[5] * 7) == [[5, 5], [5, 5], [5, 5], [5]]
    assert sizes(monkeypatch, 5, 6, 4, 1) == [[5], [6, 4], [1]]


def test_buckets_when_a_tensor_is_larger_than_one_then_it_has_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert sizes(monkeypatch, 3, 100, 3, 3) == [[3], [100], [3, 3]]
    assert sizes(monkeypatch, 100, 200) == [[100], [200]]
    assert sizes(monkeypatch) == []


def test_buckets_when_a_dtype_cannot_be_broadcast_then_refused() -> None:
    with pytest.raises(InvalidInput, match="tensor a has dtype I32"):
        list(buckets([WeightTensor("a", (1,), "I32")]))
