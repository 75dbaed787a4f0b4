"""Which way a version goes next, and when a delta is no way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.unit.areal_weight_sync.weight_sync_fakes import TENSORS, make_model

from areal.weights.delta import DeltaChain
from areal.weights.manifest import PolicyVersion
from areal.weights.publisher import NewVersion, TransportError
from areal.weights.safetensors import HostTensor
from areal_torch.publish.fallback import FallbackPublisher


def tensor(name: str, shape: tuple[int, ...], dtype: str = "F32") -> HostTensor:
    return HostTensor(name, shape, dtype, memoryview(np.zeros(shape, "f4")).cast("B"))


def new(model: Path, version: int) -> NewVersion:
    tensors = tuple(tensor(name, shape) for name, shape in sorted(TENSORS.items()))
    return NewVersion(version, 1, tensors, model)


class Way:
    """A publisher that works or does not, and remembers that it was asked."""

    def __init__(self, name: str, asked: list[str]) -> None:
        self.name = name
        self.works = True
        self._asked = asked

    def publish(
        self, version: NewVersion, announce: Callable[[PolicyVersion], None]
    ) -> PolicyVersion:
        self._asked.append(self.name)
        if not self.works:
            raise TransportError("the volume is away")
        return PolicyVersion(version.version, version.incarnation, f"/{self.name}")


def test_fallback_when_the_second_way_worked_then_it_is_the_first_one_next_time(
    tmp_path: Path,
) -> None:
    asked: list[str] = []
    disk, stream = Way("disk", asked), Way("stream", asked)
    both, model = FallbackPublisher([disk, stream]), make_model(tmp_path / "model")
    disk.works = False
    assert both.publish(new(model, 1), lambda _: None).path == "/stream"
    assert both.publish(new(model, 2), lambda _: None).path == "/stream"
    assert asked == ["disk", "stream", "stream"]
    disk.works, stream.works = True, False
    assert both.publish(new(model, 3), lambda _: None).path == "/disk"
    assert both.publish(new(model, 4), lambda _: None).path == "/disk"
    assert asked[3:] == ["stream", "disk", "disk"]
    disk.works = False
    with pytest.raises(TransportError, match="disk: the volume is away; stream: the volume"):
        both.publish(new(model, 5), lambda _: None)


@pytest.mark.parametrize(
    "other",
    [tensor("b", (4, 16)), tensor("b", (8, 8), "I32"), tensor("c", (8, 8))],
    ids=["shape", "dtype", "name"],
)
def test_chain_when_tensors_are_not_of_the_kinds_before_then_all_travels(
    tmp_path: Path, other: HostTensor
) -> None:
    before = NewVersion(1, 1, (tensor("a", (100,)), tensor("b", (8, 8))), tmp_path)
    chain = DeltaChain()
    assert chain.encode(before) is None
    chain.advance(PolicyVersion(1, 1, "/weights/v00000001-inc1"), before)
    same = replace(before, version=2)
    assert chain.encode(same) is not None
    assert chain.encode(replace(same, tensors=(before.tensors[0], other))) is None


def test_fallback_when_some_versions_have_gone_the_other_way_then_the_first_is_tried_again(
    tmp_path: Path,
) -> None:
    asked: list[str] = []
    disk, stream = Way("disk", asked), Way("stream", asked)
    both, model = FallbackPublisher([disk, stream]), make_model(tmp_path / "model")
    disk.works = False
    both.publish(new(model, 1), lambda _: None)
    disk.works = True
    for version in range(2, 18):
        both.publish(new(model, version), lambda _: None)
    assert asked == ["disk", "stream", *["stream"] * 15, "disk"]
    both.publish(new(model, 18), lambda _: None)
    assert asked[-1] == "disk"
