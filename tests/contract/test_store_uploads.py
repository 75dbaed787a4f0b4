"""Uploads to the weight store that get into each other's way."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

from tests.contract.transport_rig import HEADERS, SECURITY, Rig, open_rig, run
from tests.ports import free_port

from areal.weights.manifest import SPARE, PolicyVersion, to_json
from areal.weights.publisher import describe
from areal.weights.store_client import StoreConnection
from areal_weight_sync.store.http import StoreApp
from areal_weight_sync.store.weights import WeightStore


class Hashing(WeightStore):
    """One that hashes a large version for as long as `done` is not set."""

    def __init__(self, root: Path, model: Path) -> None:
        super().__init__(root, model)
        self.begun, self.done = threading.Event(), threading.Event()

    def commit(self, name: str, manifest: PolicyVersion) -> Path:
        self.begun.set()
        assert self.done.wait(60)
        return self._root / name


def begin(rig: Rig, url: str, version: int) -> None:
    manifest, _ = describe(rig.noisy(version))
    with StoreConnection(url, HEADERS, 10.0) as store:
        store.begin(f"v{version:08d}-inc1", to_json(manifest))


def commit(url: str, version: int) -> str:
    with StoreConnection(url, HEADERS, 10.0) as store:
        return store.commit(f"v{version:08d}-inc1")


async def test_commit_when_the_next_upload_begins_before_it_has_ended_then_it_is_answered(
    tmp_path: Path,
) -> None:
    """As when a trainer's patience ended, and its successor is there already."""
    async with open_rig(tmp_path) as rig:
        store, port = Hashing(tmp_path / "other", rig.model), free_port()
        app, url = StoreApp(store, list, lambda: rig.base, SECURITY), f"http://127.0.0.1:{port}"
        await app.start("127.0.0.1", port)
        try:
            await asyncio.to_thread(begin, rig, url, 1)
            committing = asyncio.create_task(asyncio.to_thread(commit, url, 1))
            await asyncio.to_thread(store.begun.wait, 10)
            await asyncio.to_thread(begin, rig, url, 2)
            store.done.set()
            assert Path(await committing).name == "v00000001-inc1"
            assert Path(await asyncio.to_thread(commit, url, 2)).name == "v00000002-inc1"
        finally:
            store.done.set()
            await app.close()


async def test_upload_when_a_retired_folder_is_reused_then_nothing_else_of_it_stays(
    tmp_path: Path,
) -> None:
    async with open_rig(tmp_path) as rig:
        spare = tmp_path / "weights" / SPARE
        spare.mkdir(parents=True)
        stale = {"model-00001-of-00002.safetensors", "delta.bin", "notes.txt"}
        for name in (*stale, "model.safetensors"):
            (spare / name).write_bytes(b"of another version")
        new = rig.noisy(1)
        version = await run(lambda: rig.publisher("stream").publish(new, rig.announce))
        assert not spare.exists(), "it was reused"
        names = {file.name for file in await run(lambda: list(Path(version.path).iterdir()))}
        assert names.isdisjoint(stale)
        assert "model.safetensors" in names
