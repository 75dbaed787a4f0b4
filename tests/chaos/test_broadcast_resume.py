"""A trainer that dies after it has broadcast a version and before that is stored anywhere.

The next one makes that version again, and here on purpose with other weights: no server may
continue with the abandoned ones under the same number.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import pytest
from tests.chaos.replays import prefilled
from tests.chaos.trainer_rig import BATCH, TrainerRig, trainer_rig
from tests.integration.stack_tools import eventually

from areal.clients.weight_sync import WeightSyncClient
from areal.config.experiment import load_service_config
from areal.weights.manifest import PolicyVersion, build_manifest
from areal.weights.servers import InferenceServer, ServerState

pytestmark = pytest.mark.timeout(300)

STEPS, ABANDONED = 4, 3


class StuckStore:
    """In front of the weight store: one version is never answered."""

    def __init__(self, url: str, version: int) -> None:
        self._store = urlsplit(url)
        self._mark = f"/versions/v{version:08d}-".encode()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._held: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        for each in (self._listener, *self._held):
            each.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                threading.Thread(
                    target=self._serve, args=self._listener.accept()[:1], daemon=True
                ).start()

    def _serve(self, client: socket.socket) -> None:
        first = client.recv(1 << 16)
        if self._mark in first.partition(b"\r\n")[0]:
            self._held.append(client)
            return
        with client, socket.create_connection((self._store.hostname, self._store.port)) as store:
            store.sendall(first)
            back = threading.Thread(target=_pipe, args=(store, client), daemon=True)
            back.start()
            _pipe(client, store)
            back.join()


def _pipe(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 20):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


class Watcher:
    """Weight-sync, and what is in the memory of its servers."""

    def __init__(self, rig: TrainerRig, session: aiohttp.ClientSession) -> None:
        self.client = WeightSyncClient(rig.stack.address("weight-sync"), rig.stack.security)
        self._session = session
        self._headers = rig.stack.security.headers()
        self.compared = 0

    async def held(self, server: InferenceServer) -> dict[str, str]:
        """Digests of its tensors."""
        url, body = f"{server.url}/weights_checker", {"action": "checksum"}
        async with self._session.post(url, json=body, headers=self._headers) as answer:
            return dict((await answer.json())["ranks"][0]["checksums"])

    async def compare(self, version: PolicyVersion) -> None:
        """A server listed as serving that version has its weights."""
        expected = {tensor.name: tensor.digest for tensor in version.tensors}
        for server in (await self.client.list_servers())[0]:
            found = await self.held(server)
            current = (await self.client.status()).current
            now = {s.server_id: s for s in (await self.client.list_servers())[0]}
            still = server.state is ServerState.SERVING and now.get(server.server_id) == server
            same = current is not None and current.path == version.path
            if still and same and server.version == version.version:
                assert found == expected, f"{server} holds other weights than {version.path}"
                self.compared += 1


async def abandon(rig: TrainerRig, watcher: Watcher, store: StuckStore, file: Path) -> None:
    """Two ranks train and broadcast, until one version is with all servers and nowhere else."""
    # No folder can be made below a file, so that versions go to the store.
    changes = {"weight_sync__path": str(file), "endpoints__weight_store": store.url}
    trainer = rig.trainer(2, checkpoint__freq_steps=ABANDONED - 1, **changes)

    def unstored(status) -> bool:
        assert trainer.popen.poll() is None, rig.trainer_log[-4000:]
        return (status.current_version, status.unstored, status.confirmed_servers) == (3, True, 2)

    await watcher.client.wait_for("a version that is not stored", unstored, timeout=120.0)
    checkpoint = rig.run_dir / "checkpoints" / f"step_{ABANDONED - 1}-inc_1"
    await asyncio.to_thread(eventually, checkpoint.is_dir, "a checkpoint before it", 30.0)
    trainer.kill()
    assert "distributed:" not in rig.trainer_log  # every broadcast has reached every server
    assert {line["rank"] for line in rig.seen()} == {0, 1}


async def resumed(rig: TrainerRig, file: Path) -> None:
    async with aiohttp.ClientSession() as session:
        endpoints = load_service_config(rig.run_dir / "config.yaml").endpoints
        watcher = Watcher(rig, session)
        store = StuckStore(endpoints.weight_store, ABANDONED)
        await abandon(rig, watcher, store, file)
        store.close()
        servers = (await watcher.client.list_servers())[0]
        abandoned = [await watcher.held(server) for server in servers]
        assert abandoned[0] == abandoned[1]

        # Other weights beyond doubt, and a second to look at them.
        trainer = rig.trainer(1, actor__optimizer__lr=5e-3, pace_s=1.0)
        await watcher.client.wait_for(
            "the version made again", lambda status: not status.unstored, timeout=60.0
        )
        (again,) = [v for v in await watcher.client.list_versions() if v.version == ABANDONED]
        assert again.incarnation == 2
        assert {t.name: t.digest for t in again.tensors} != abandoned[0]
        while (await watcher.client.status()).current_version == ABANDONED:
            await watcher.compare(again)
        assert watcher.compared >= 2
        assert await asyncio.to_thread(trainer.popen.wait, 120) == 0, rig.trainer_log[-4000:]
        await watcher.client.wait_for(
            "the last version", lambda status: status.confirmed_servers == 2, timeout=30.0
        )
        final = build_manifest(rig.run_dir / "final", STEPS, 2)
        for server in (await watcher.client.list_servers())[0]:
            assert server.version == STEPS
            assert await watcher.held(server) == {t.name: t.digest for t in final.tensors}
        await watcher.client.close()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[TrainerRig]:
    from areal_torch.models.tiny import make_tiny_model

    model = Path(make_tiny_model(tmp_path / "model", seed=0))
    overrides = (
        *prefilled(model, STEPS),
        "weight_sync.transport=distributed",
        "allocation_mode=sglang:d2+fsdp:d1",
    )
    with trainer_rig(tmp_path, "resumed", *overrides, generation=False) as rig:
        rig.prefill(STEPS * BATCH)
        yield rig


def test_trainer_when_killed_between_broadcast_and_store_then_servers_get_the_version_created_again(
    rig: TrainerRig, tmp_path: Path
) -> None:
    file = tmp_path / "no-folder"
    file.touch()
    asyncio.run(resumed(rig, file))
