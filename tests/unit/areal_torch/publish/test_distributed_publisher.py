"""The trainer's end of a broadcast: whatever goes wrong, the version is stored and no one hangs."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from pathlib import Path

import pytest
import torch

from areal.weights.broadcast import Offer, Seats
from areal.weights.manifest import PolicyVersion
from areal.weights.publisher import NewVersion
from areal_torch.engines.export.publishing import host_tensors
from areal_torch.publish import distributed
from areal_torch.publish.distributed import DistributedPublisher

LOOPBACK = "127.0.0.1:9"


class Stored:
    """A publisher that remembers."""

    name = "stored"

    def __init__(self) -> None:
        self.versions: list[int] = []

    def publish(self, new: NewVersion, announce: Callable[[PolicyVersion], None]) -> PolicyVersion:
        self.versions.append(new.version)
        return PolicyVersion(new.version, new.incarnation, "/weights")


class Breaking:
    """A group that cannot be made for a reason of this process, not of a member."""

    @staticmethod
    def lead(*_: object) -> None:
        raise torch.OutOfMemoryError("out of memory")


class Repeat:
    """See `Again`."""

    def __init__(self) -> None:
        self.skipped = 0

    def buckets(self) -> Generator[list[tuple[str, torch.Tensor]]]:
        raise AssertionError("no one is there to take it")
        yield []

    def skip(self) -> None:
        self.skipped += 1


class Rig:
    def __init__(self, tmp_path: Path, weight_sync: str) -> None:
        (tmp_path / "config.json").write_text("{}")
        self.model = tmp_path
        self.stored = Stored()
        self.offers: list[Offer] = []
        self.publisher = DistributedPublisher(self.stored, self.offer, tmp_path, weight_sync)

    def offer(self, version: PolicyVersion, offer: Offer) -> Seats:
        self.offers.append(offer)
        return Seats("group-1", 2)

    def publish(self, version: int, tensor: torch.Tensor) -> None:
        again = Repeat()
        new = NewVersion(version, 1, host_tensors([("w", tensor)]), self.model, again)
        self.publisher.publish(new, lambda _: None)
        assert again.skipped, "the trainer's next step would wait"


@pytest.mark.parametrize(
    ("weight_sync", "tensor", "cause"),
    [
        ("no-such-host.invalid:7300", torch.ones(2), "no-such-host"),
        (LOOPBACK, torch.ones(2, dtype=torch.int64), "dtype I64"),
    ],
)
def test_version_when_it_cannot_be_broadcast_then_stored_and_the_cause_is_logged(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    weight_sync: str,
    tensor: torch.Tensor,
    cause: str,
) -> None:
    rig = Rig(tmp_path, weight_sync)
    rig.publish(1, tensor)
    assert (rig.stored.versions, rig.offers) == ([1], [])
    said = capsys.readouterr().out
    assert "transport_fell_back" in said
    assert cause in said


def test_broadcast_when_this_process_fails_then_the_trainer_stores_and_tries_again_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(distributed, "ProcessGroup", Breaking)
    rig = Rig(tmp_path, LOOPBACK)
    since = time.monotonic()
    for version in range(1, 12):
        rig.publish(version, torch.ones(2))
    assert time.monotonic() - since < distributed.JOIN_S
    assert rig.stored.versions == list(range(1, 12))
    assert len(rig.offers) == 3  # then eight versions are only stored
    assert "out of memory" in capsys.readouterr().out
    rig.publish(12, torch.ones(2))
    assert len(rig.offers) == 4


def test_broadcast_when_it_fails_on_gpus_then_the_cause_names_the_trainers_nccl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(distributed, "ProcessGroup", Breaking)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 5))
    rig = Rig(tmp_path, LOOPBACK)
    rig.publish(1, torch.ones(2))
    assert [offer.backend for offer in rig.offers] == ["nccl"]
    assert "distributed: out of memory (NCCL 2.27.5 here)" in capsys.readouterr().out


def test_offer_when_the_way_to_weight_sync_is_ipv6_then_servers_are_told_that_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distributed, "ProcessGroup", Breaking)
    rig = Rig(tmp_path, "[::1]:9")
    rig.publish(1, torch.ones(2))
    assert [offer.address for offer in rig.offers] == ["::1"]
