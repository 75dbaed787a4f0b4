"""`delta` on every transport, to every kind of server: what changed travels, nothing is lost.

A server that holds the base reads the delta only; a newcomer, one that holds other weights, and one
that is given a damaged delta read the whole snapshot, which is always there.
"""

from __future__ import annotations

import shutil
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.contract.transport_rig import HEADERS, SECURITY, TRANSPORTS, Rig, free_port, run, same

from areal.errors import InvalidInput
from areal.weights.delta import Delta, DeltaChain, complete, encode, rebuild
from areal.weights.fetch import fetch_version
from areal.weights.manifest import DeltaFile, PolicyVersion, read_manifest, version_name
from areal.weights.publisher import NewVersion, Publisher, TransportError
from areal.weights.safetensors import HostTensor, digest_of
from areal_inference.model.weights import WeightError, Weights
from areal_torch.publish.fallback import FallbackPublisher
from areal_torch.publish.stream import StreamPublisher

WHOLE, DELTA = "model.safetensors", "delta.bin"


def sparse(rig: Rig, version: int, before: NewVersion | None, share: float) -> NewVersion:
    """A version of which a share of the elements differs from the one before."""
    generator = torch.Generator().manual_seed(version)
    held = {t.name: t for t in before.tensors} if before else {}

    def change(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name in held:
            tensor = torch.frombuffer(bytearray(held[name].data), dtype=torch.float32)
            tensor = tensor.view(held[name].shape)
        mask = torch.rand(tensor.shape, generator=generator) < share
        return tensor + mask * 1e-4 * torch.randn(tensor.shape, generator=generator)

    return rig.new(version, change)


class Chain:
    """A trainer that publishes one version after the other as deltas."""

    def __init__(self, rig: Rig, transport: str) -> None:
        self.rig, self.transport = rig, transport
        self.publisher: Publisher = rig.publisher(transport, DeltaChain())
        self.news: list[NewVersion] = []

    async def publish(self, share: float = 0.03) -> PolicyVersion:
        before = self.news[-1] if self.news else None
        new = sparse(self.rig, len(self.news) + 1, before, share)
        self.news.append(new)
        return await run(lambda: self.publisher.publish(new, self.rig.announce))

    async def load(self, version: PolicyVersion, held: Weights | None = None) -> Weights:
        location = self.rig.location(self.transport, version)
        return await run(lambda: self.rig.load(location, held=held))


def without(version: PolicyVersion, file: str) -> AbstractContextManager[None]:
    """A file of a published folder is away for a while."""

    @contextmanager
    def hide():
        path, away = Path(version.path) / file, Path(version.path) / f".{file}"
        path.rename(away)
        yield
        away.rename(path)

    return hide()


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_delta_when_little_changed_then_holders_read_only_that_and_nothing_is_lost(
    rig: Rig, transport: str, capsys: pytest.CaptureFixture[str]
) -> None:
    chain, memory = Chain(rig, transport), rig.root / "memory"
    first = await chain.publish()
    assert first.delta is None  # nothing to start from
    held = await chain.load(first)
    await run(lambda: fetch_version(rig.location("stream", first), HEADERS, memory))
    for number in (2, 3, 4):
        version = await chain.publish()
        new = chain.news[-1]
        assert version.delta is not None
        assert version.delta.base == version_name(number - 1, 1)
        assert version.delta.size_bytes < version.size_bytes / 10
        # A newcomer.
        same(await chain.load(version), new)
        location = rig.location("stream", version)
        with without(version, WHOLE):  # a server with the base needs nothing but the delta
            held = await chain.load(version, held)
            pulled = await run(lambda at=location: fetch_version(at, HEADERS, memory))
        same(held, new)
        same(await run(lambda p=pulled: rig.load(p.path)), new)
        assert held.checksums() == {t.name: t.digest for t in version.tensors}
    said = capsys.readouterr().out
    assert "delta_unusable" not in said
    assert "delta_refused" not in said


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_delta_when_the_server_holds_other_weights_then_it_reads_the_snapshot(
    rig: Rig, transport: str
) -> None:
    chain = Chain(rig, transport)
    held = await chain.load(await chain.publish())
    await chain.publish()
    third = await chain.publish()  # of the second, which this server never had
    with without(third, DELTA):
        same(await chain.load(third, held), chain.news[-1])
    with without(third, WHOLE), pytest.raises((WeightError, TransportError)):
        await chain.load(third, held)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("damage", ["truncated", "padded", "flipped", "missing", "other"])
async def test_delta_when_damaged_then_servers_read_the_snapshot(
    rig: Rig, transport: str, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    chain, memory = Chain(rig, transport), rig.root / "memory"
    first = await chain.publish()
    held = await chain.load(first)
    await run(lambda: fetch_version(rig.location("stream", first), HEADERS, memory))
    second = await chain.publish()
    file = Path(second.path) / DELTA
    raw = bytearray(file.read_bytes())
    if damage == "missing":
        file.unlink()
    elif damage == "other":  # one that is whole, of the same base, but says another thing
        other = sparse(rig, 7, chain.news[0], 0.03)
        before = {t.name: t.data for t in chain.news[0].tensors}
        file.write_bytes(encode(other.tensors, before, first.digest) or b"")
    else:
        changed = {"truncated": raw[:-9], "padded": raw + b"\0"}.get(damage)
        if changed is None:
            raw[len(raw) // 2] ^= 1
        file.write_bytes(changed or raw)
    same(await chain.load(second, held), chain.news[-1])
    if (damage, transport) != ("padded", "stream"):  # over HTTP no one asks for what follows
        assert "delta_unusable" in capsys.readouterr().out
    location = rig.location("stream", second)
    pulled = await run(lambda: fetch_version(location, HEADERS, memory))
    same(await run(lambda: rig.load(pulled.path)), chain.news[-1])


async def test_pulled_base_when_damaged_then_the_whole_file_is_pulled(
    rig: Rig, capsys: pytest.CaptureFixture[str]
) -> None:
    chain, memory = Chain(rig, "stream"), rig.root / "memory"
    first = await chain.publish()
    base = await run(lambda: fetch_version(rig.location("stream", first), HEADERS, memory))
    file = Path(base.path) / WHOLE
    raw = bytearray(file.read_bytes())
    raw[-3] ^= 1
    file.write_bytes(raw)
    second = await chain.publish()
    pulled = await run(lambda: fetch_version(rig.location("stream", second), HEADERS, memory))
    same(await run(lambda: rig.load(pulled.path)), chain.news[-1])
    assert "delta_unusable" in capsys.readouterr().out


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("loss", ["gone", "other"])
async def test_chain_when_its_base_is_gone_or_another_then_the_whole_file_travels(
    rig: Rig, transport: str, loss: str, capsys: pytest.CaptureFixture[str]
) -> None:
    chain = Chain(rig, transport)
    first = await chain.publish()
    if loss == "gone":  # collected, or the volume was lost
        shutil.rmtree(first.path)
    else:  # the name is there, with other weights in it
        shutil.rmtree(first.path)
        other = replace(rig.noisy(1), incarnation=1)
        await run(lambda: rig.publisher("disk").publish(other, rig.announce))
    second = await chain.publish()
    assert second.delta is None
    assert read_manifest(Path(second.path)).delta is None
    assert "delta_refused" in capsys.readouterr().out
    same(await chain.load(second), chain.news[-1])
    third = await chain.publish()  # and the chain continues from there
    assert third.delta is not None
    same(await chain.load(third), chain.news[-1])


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_delta_when_it_does_not_pay_then_the_whole_file_travels(
    rig: Rig, transport: str
) -> None:
    chain = Chain(rig, transport)
    await chain.publish()
    second = await chain.publish(share=1.0)
    assert second.delta is None
    same(await chain.load(second), chain.news[-1])


async def test_chain_when_a_transport_fails_then_the_next_one_goes_on_with_it(rig: Rig) -> None:
    links = DeltaChain()
    broken = StreamPublisher(f"http://127.0.0.1:{free_port()}", SECURITY, 2.0, chain=links)
    chain = Chain(rig, "disk")
    chain.publisher = rig.publisher("stream", links)
    await chain.publish()
    chain.publisher = FallbackPublisher([broken, rig.publisher("disk", links)])
    second = await chain.publish()
    assert second.delta is not None
    same(await chain.load(second), chain.news[-1])


async def test_complete_when_killed_in_the_middle_then_done_again(rig: Rig) -> None:
    chain = Chain(rig, "disk")
    await chain.publish()
    second = await chain.publish()
    folder = Path(second.path)
    assert second.delta is not None
    (folder / WHOLE).rename(folder / ".partial")
    (folder / ".partial").write_bytes(b"half")
    complete(folder, second.delta)
    same(await chain.load(second), chain.news[-1])
    assert not (folder / ".partial").exists()


async def test_rebuild_when_the_base_is_another_or_the_delta_is_broken_then_refused(
    rig: Rig,
) -> None:
    one, two = sparse(rig, 1, None, 1.0), sparse(rig, 2, None, 1.0)
    bases = [
        await run(lambda n=n: rig.publisher("stream").publish(n, rig.announce)) for n in (one, two)
    ]
    three = sparse(rig, 3, one, 0.03)
    raw = encode(three.tensors, {t.name: t.data for t in one.tensors}, bases[0].digest)
    assert raw is not None
    folder = rig.root / "rebuilt"
    folder.mkdir()
    (folder / DELTA).write_bytes(raw)
    wanted = DeltaFile("v00000001-inc1", bases[0].digest, len(raw), digest_of(raw))
    with pytest.raises(InvalidInput, match="based on weights"):
        rebuild(folder, Path(bases[1].path), wanted)
    with pytest.raises(InvalidInput, match="based on weights"):
        rebuild(folder, Path(bases[1].path), replace(wanted, base_digest=bases[1].digest))
    rebuild(folder, Path(bases[0].path), wanted)
    held = load_file(folder / WHOLE)
    for tensor in three.tensors:
        assert held[tensor.name].view(-1).view(torch.uint8).numpy().tobytes() == bytes(tensor.data)
    # Broken, and announced as such: what is inside is looked at as well.
    frames = len(raw) // 2
    for broken in (
        raw[:-1],
        raw + b"x",
        raw[:7],
        b"",
        raw[:200] + bytes(40) + raw[240:],
        raw[:frames] + bytes(64) + raw[frames + 64 :],
    ):
        (folder / DELTA).write_bytes(broken)
        with pytest.raises(InvalidInput, match=r"delta\.bin"):
            rebuild(folder, Path(bases[0].path), wanted)
        told = replace(wanted, size_bytes=len(broken), digest=digest_of(broken))
        with pytest.raises(InvalidInput, match=r"delta\.bin"):
            rebuild(folder, Path(bases[0].path), told)


@pytest.mark.parametrize("dtype", ["BF16", "F32"])
@pytest.mark.parametrize("share", [0.0, 1e-6, 0.01, 0.03, 0.6, 1.0])
def test_delta_when_bits_are_arbitrary_then_exact(dtype: str, share: float) -> None:
    """NaN payloads, signed zeros, infinities: bits are bits."""
    rng = np.random.default_rng(0)
    width = 2 if dtype == "BF16" else 4
    before = rng.integers(0, 256, 60_000 * width, dtype=np.uint8)
    after = before.copy().reshape(-1, width)
    chosen = np.flatnonzero(rng.random(60_000) < share) if share else np.array([], int)
    after[chosen, 0] ^= 1 + rng.integers(0, 255, chosen.size).astype(np.uint8)
    new = HostTensor("t", (60_000,), dtype, memoryview(after.reshape(-1)))
    raw = encode([new], {"t": before.tobytes()}, "base")
    if raw is None:
        assert share == 1.0
        return
    delta, target = Delta(raw), bytearray(before.tobytes())
    delta.apply("t", dtype, memoryview(target))
    assert bytes(target) == after.tobytes()
    assert delta.changed() == chosen.size
