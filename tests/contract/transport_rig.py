"""A model, the real weight store around it, and a trainer's publishers: for transports' suites."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file
from tests.inference_server import make_model, save_tokenizer
from tests.ports import free_port

from areal.config import transports
from areal.config.transports import STORING
from areal.security import Security
from areal.weights.broadcast import Offer, Seat, Seats, buckets
from areal.weights.delta import DeltaChain
from areal.weights.manifest import PolicyVersion, build_manifest, check_same_tensors, version_name
from areal.weights.publisher import NewVersion, Publisher
from areal_inference.http_api.weight_groups import Groups, MemorySource
from areal_inference.model.config import ModelConfig
from areal_inference.model.weights import Weights, load_weights
from areal_torch.engines.export.publishing import host_tensors
from areal_torch.publish.disk import DiskPublisher
from areal_torch.publish.distributed import DistributedPublisher
from areal_torch.publish.stream import StreamPublisher
from areal_weight_sync.engine.broadcast_group import BroadcastGroup
from areal_weight_sync.store.http import StoreApp
from areal_weight_sync.store.weights import WeightStore
from areal_weight_sync.versions import DigestCache

SECURITY = Security(token="0123456789abcdef")
HEADERS = SECURITY.headers()
TRANSPORTS = list(STORING)
"""Those that keep a version."""
EVERY_TRANSPORT = list(transports.TRANSPORTS)
T = TypeVar("T")


@dataclass
class Rig:
    """A model, a weight store around it, and what weight-sync was told."""

    root: Path
    model: Path
    url: str
    base: PolicyVersion
    announced: list[PolicyVersion] = field(default_factory=list)
    digests: DigestCache = field(default_factory=DigestCache)
    received: Future[Weights] = field(default_factory=Future)
    pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))

    def publisher(self, transport: str, chain: DeltaChain | None = None) -> Publisher:
        if transport == "disk":
            return DiskPublisher(self.root / "weights", chain=chain)
        if transport == "distributed":
            root, store = self.root / "weights", self.url.removeprefix("http://")
            return DistributedPublisher(DiskPublisher(root), self.offer, root, store)
        return StreamPublisher(self.url, SECURITY, 10.0, chain=chain)

    def announce(self, version: PolicyVersion) -> None:
        """What PublishVersion does to a version's files."""
        self.digests.verify(version)
        check_same_tensors(version, self.base)
        self.announced.append(version)

    def offer(self, version: PolicyVersion, offer: Offer) -> Seats:
        """What PublishVersion does to an offer, and a server that is told to take part."""
        check_same_tensors(version, self.base)
        list(buckets(version.tensors))
        seat = Seat(offer, f"group-{version.version}", 1, 2, version.tensors)
        self.received = self.pool.submit(asyncio.run, self._receive(version, seat))
        return Seats(seat.group, seat.world_size)

    async def _receive(self, version: PolicyVersion, seat: Seat) -> Weights:
        config, source = ModelConfig.from_folder(self.model), MemorySource()
        groups = Groups(config)

        async def command(path: str, body: dict[str, Any], timeout: float) -> None:
            assert path == "/init_weights_update_group"
            await groups.join(body)

        member = BroadcastGroup(command)
        await member.join(seat)
        digests = [tensor.digest for tensor in version.tensors]
        await groups.receive(member.request(version.tensors) | {"digests": digests}, source)
        return load_weights("broadcast", config, torch.float32, source=source)

    def new(self, version: int, change: Callable[[str, torch.Tensor], torch.Tensor]) -> NewVersion:
        tensors = load_file(self.model / "model.safetensors")
        changed = [(name, change(name, tensor)) for name, tensor in tensors.items()]
        return NewVersion(version, 1, host_tensors(changed), self.model)

    def noisy(self, version: int) -> NewVersion:
        generator = torch.Generator().manual_seed(version)
        return self.new(version, lambda _, t: t + 1e-3 * torch.randn(t.shape, generator=generator))

    def location(self, transport: str, version: PolicyVersion) -> str:
        """Where an inference server is told to read."""
        if transport == "disk":
            return version.path
        if transport == "distributed":
            return "broadcast"
        return f"{self.url}/versions/{version_name(version.version, version.incarnation)}"

    def load(
        self, location: str, spare: Weights | None = None, held: Weights | None = None
    ) -> Weights:
        """What areal-inference does with it."""
        if location == "broadcast":
            return self.received.result(90)
        config = ModelConfig.from_folder(self.model)
        return load_weights(
            location, config, torch.float32, headers=HEADERS, spare=spare, held=held
        )


@asynccontextmanager
async def open_rig(tmp_path: Path) -> AsyncIterator[Rig]:
    """With its store listening."""
    model = tmp_path / "model"
    make_model(model)
    save_tokenizer(model)
    base = build_manifest(model, 0, 0)
    port = free_port()
    rig = Rig(tmp_path, model, f"http://127.0.0.1:{port}", base)
    app = StoreApp(
        WeightStore(tmp_path / "weights", model),
        lambda: [*rig.announced[-1:], base],
        lambda: base,
        SECURITY,
    )
    await app.start("127.0.0.1", port)
    try:
        yield rig
    finally:
        await app.close()


async def run(work: Callable[[], T]) -> T:
    """Blocking work beside the store's event loop."""
    return await asyncio.to_thread(work)


def same(weights: Weights, new: NewVersion) -> None:
    """Bit for bit what the trainer has in memory."""
    expected = {t.name: bytes(t.data) for t in new.tensors}
    for name, view in weights.views.items():
        held = view.target.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        assert held == expected[name], name
