"""A trainer that broadcasts, around real services and engines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Generator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import torch
from safetensors.torch import load_file
from tests.inference_server import make_model
from tests.integration.weight_sync_rig import Process, WeightSyncRig, inference, rig_with_stores

from areal.weights.broadcast import Offer, Seats
from areal.weights.manifest import PolicyVersion
from areal.weights.publisher import NewVersion
from areal.weights.servers import ServerState
from areal_torch.engines.export.publishing import host_tensors
from areal_torch.publish.disk import DiskPublisher
from areal_torch.publish.distributed import DistributedPublisher

SERVING = ServerState.SERVING


class Gathered:
    """See `Again`: a few tensors at a time, as an export gathers them."""

    def __init__(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        self._tensors = tensors
        self.asked = self.skipped = False

    def buckets(self) -> Generator[list[tuple[str, torch.Tensor]]]:
        self.asked = True
        for start in range(0, len(self._tensors), 3):
            yield self._tensors[start : start + 3]

    def skip(self) -> None:
        self.skipped = True


class Trainer:
    """Rank 0, as `FSDPPPOActor.upload_weights` and its session are."""

    def __init__(self, rig: WeightSyncRig) -> None:
        self.rig = rig
        self.offers: list[Seats] = []
        self.published: list[PolicyVersion] = []
        self.loop = asyncio.get_running_loop()
        self.tensors = load_file(rig.model / "model.safetensors")
        self.publisher = DistributedPublisher(
            DiskPublisher(rig.weights_root), self._offer, rig.weights_root, rig.address
        )

    def _call(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(90)

    def _offer(self, version: PolicyVersion, offer: Offer) -> Seats:
        self.offers.append(self._call(self.rig.client.offer_version(version, offer)))
        return self.offers[-1]

    def _announce(self, version: PolicyVersion) -> None:
        self._call(self.rig.client.publish_version(version))
        self.published.append(version)

    async def publish(self, version: int, **replaced: torch.Tensor) -> float:
        """Returns how long the trainer was blocked."""
        changed = [(n, t + 0.001 * version) for n, t in (self.tensors | replaced).items()]
        changed.reverse()  # an order of its own, as a model has
        again = Gathered(changed)
        new = NewVersion(version, 1, host_tensors(changed), self.rig.model, again)
        since = time.monotonic()
        await asyncio.to_thread(self.publisher.publish, new, self._announce)
        # The other ranks of a trainer wait for one of the two.
        assert again.asked or again.skipped
        assert self.offers[-1].world_size > 0 or not again.asked
        return time.monotonic() - since


class World:
    """A weight-sync with stores, its servers, and a trainer."""

    def __init__(self, tmp_path: Path, rig: WeightSyncRig, stack: AsyncExitStack) -> None:
        self.rig = rig
        self.trainer = Trainer(rig)
        self.servers: list[tuple[Process, str]] = []
        self._tmp_path = tmp_path
        self._stack = stack

    async def add(self) -> tuple[Process, str]:
        name = f"inference-{len(self.servers)}"
        server = inference(self._tmp_path, self.rig.model, name)
        server[0].start()
        self._stack.callback(server[0].stop)
        self.servers.append(server)
        await self.rig.client.register_server(server[1])
        return server

    async def at(self, version: int) -> None:
        """Every server serves it, with the trainer's bits."""
        expected = {t.name: t.digest for t in self.trainer.published[-1].tensors}
        async with aiohttp.ClientSession() as session:
            for _, url in self.servers:
                await self.rig.until(url, SERVING, version)
                body = {"action": "checksum"}
                async with session.post(f"{url}/weights_checker", json=body) as answer:
                    assert (await answer.json())["ranks"][0]["checksums"] == expected


@asynccontextmanager
async def running_world(tmp_path: Path) -> AsyncIterator[World]:
    """Two servers at version 0."""
    torch.set_num_threads(1)
    model = tmp_path / "model"
    # Larger than what sockets hold: a broadcast to somebody who does not read blocks.
    make_model(model, vocab_size=300, hidden_size=512, intermediate_size=2048)
    async with (
        rig_with_stores(tmp_path, model, transport="distributed") as rig,
        AsyncExitStack() as stack,
    ):
        await rig.started()
        made = World(tmp_path, rig, stack)
        for _ in range(2):
            await made.add()
        for _, url in made.servers:
            await rig.until(url, SERVING, 0)
        yield made
