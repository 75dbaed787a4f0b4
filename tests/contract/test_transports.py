"""What every transport promises, driven end to end with the real parts of each side.

A trainer's tensors are published, weight-sync's store is a real HTTP server, and what a server
would compute with is read back: by areal-inference's loader, or from the sidecar's folder.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch
from aiohttp import web
from safetensors.torch import load_file
from tests.contract.transport_rig import (
    EVERY_TRANSPORT,
    HEADERS,
    SECURITY,
    TRANSPORTS,
    Rig,
    free_port,
    run,
    same,
)

from areal.errors import CapacityExceeded, InvalidInput
from areal.weights.fetch import fetch_model, fetch_version
from areal.weights.manifest import SPARE, build_manifest, version_name
from areal.weights.publisher import NewVersion, TransportError
from areal.weights.safetensors import HostTensor
from areal.weights.sidecar import Sidecar
from areal.weights.store_client import StoreConnection
from areal_inference.model.weights import WeightError
from areal_torch.publish.disk import DiskPublisher
from areal_torch.publish.fallback import FallbackPublisher
from areal_torch.publish.stream import StreamPublisher
from areal_weight_sync.engine.base import EngineError
from areal_weight_sync.engine.http import HttpEngine, open_session
from areal_weight_sync.engine.routes import Routes
from areal_weight_sync.store.weights import WeightStore

Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize("transport", EVERY_TRANSPORT)
async def test_version_when_published_then_servers_hold_the_trainers_bits(
    rig: Rig, transport: str
) -> None:
    spare = None
    for number in (1, 2, 3):
        new = rig.noisy(number)
        version = await run(lambda new=new: rig.publisher(transport).publish(new, rig.announce))
        assert rig.announced[-1] == version
        assert version.publish_time > 0
        assert {t.name for t in version.tensors} == {t.name for t in rig.base.tensors}
        assert version.digest != rig.base.digest
        assert (Path(version.path) / "tokenizer.json").is_file()
        loaded = await run(lambda v=version, s=spare: rig.load(rig.location(transport, v), s))
        same(loaded, new)
        assert loaded.checksums() == {t.name: t.digest for t in version.tensors}
        spare = loaded  # the next version is written over this one


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_version_when_read_by_the_sidecar_then_is_a_folder_any_engine_loads(
    rig: Rig, transport: str
) -> None:
    new = rig.noisy(1)
    await run(lambda: rig.publisher(transport).publish(new, rig.announce))
    port = free_port()
    runner = web.AppRunner(Sidecar(rig.root / "memory", SECURITY).application())
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
            body = {"model_path": f"{rig.url}/versions/{new.name}"}
            async with session.post("/stage_weights", json=body) as refused:
                assert refused.status == 401
            async with session.post("/stage_weights", json=body, headers=HEADERS) as answer:
                assert answer.status == 200, await answer.text()
                folder = Path((await answer.json())["model_path"])
            missing = {"model_path": f"{rig.url}/versions/v00000009-inc1"}
            async with session.post("/stage_weights", json=missing, headers=HEADERS) as answer:
                assert answer.status == 400
                assert "not in the weight store" in (await answer.json())["message"]
    finally:
        await runner.cleanup()
    held = load_file(folder / "model.safetensors")
    for tensor in new.tensors:
        assert held[tensor.name].view(-1).view(torch.uint8).numpy().tobytes() == bytes(tensor.data)
    assert build_manifest(folder, 1, 1).files == rig.announced[-1].files


async def test_version_when_a_sidecar_has_it_then_the_next_pulls_it_there(rig: Rig) -> None:
    new = rig.noisy(1)
    await run(lambda: rig.publisher("stream").publish(new, rig.announce))
    ports = free_port(), free_port()
    runners = [
        await serve(Sidecar(rig.root / f"memory-{port}", SECURITY).application(), port)
        for port in ports
    ]
    source = f"{rig.url}/versions/{new.name}"
    try:
        async with aiohttp.ClientSession(headers=HEADERS) as session:
            for port in ports:
                url = f"http://127.0.0.1:{port}/stage_weights"
                async with session.post(url, json={"model_path": source}) as answer:
                    assert answer.status == 200, await answer.text()
                source = f"http://127.0.0.1:{port}/versions/{new.name}"
                shutil.rmtree(rig.root / "weights" / new.name, ignore_errors=True)
            async with session.get(f"{source}/../x") as answer:
                assert answer.status == 404
            for missing in ("tokenizer.json", "other", "v00000002-inc1/manifest.json"):
                async with session.get(f"{source}/{missing}") as answer:
                    assert answer.status == 404
        async with aiohttp.ClientSession() as stranger, stranger.get(f"{source}/x") as answer:
            assert answer.status == 401
    finally:
        for runner in runners:
            await runner.cleanup()
    folders = [rig.root / f"memory-{port}" / new.name for port in ports]
    for folder in folders:
        assert build_manifest(folder, 1, 1).files == rig.announced[-1].files


async def test_version_0_when_nobody_published_then_the_store_has_the_model(rig: Rig) -> None:
    location = f"{rig.url}/versions/{version_name(0, 0)}"
    weights = await run(lambda: rig.load(location))
    assert weights.checksums() == {t.name: t.digest for t in rig.base.tensors}


async def test_model_when_fetched_then_an_engine_can_start_from_it(rig: Rig) -> None:
    folder = rig.root / "fetched"
    location = f"{rig.url}/versions/{version_name(0, 0)}"
    assert await run(lambda: fetch_model(location, HEADERS, folder)) == len(list(folder.iterdir()))
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        assert (folder / name).read_bytes() == (rig.model / name).read_bytes()
    assert await run(lambda: fetch_model(location, HEADERS, folder))  # again, after a restart
    with pytest.raises(TransportError, match="not in the weight store"):
        await run(lambda: fetch_model(f"{rig.url}/versions/v00000009-inc1", HEADERS, folder))


@pytest.mark.parametrize("transport", EVERY_TRANSPORT)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda n: (*n, _tensor("model.extra", (2,))), "model.extra is unknown"),
        (lambda n: n[1:], "is missing"),
        (lambda n: (*(t for t in n if t.name != Q), _tensor(Q, (63, 64))), "shape [63, 64]"),
        (lambda n: (*(t for t in n if t.name != Q), _tensor(Q, (64, 64), "I32")), "dtype I32"),
    ],
    ids=["unknown", "missing", "wrong-shaped", "wrong-typed"],
)
async def test_version_when_a_tensor_is_wrong_then_refused_by_name(
    rig: Rig, transport: str, change, message: str
) -> None:
    good = rig.noisy(1)
    bad = NewVersion(1, 1, change(good.tensors), rig.model)
    with pytest.raises((TransportError, InvalidInput)) as caught:
        await run(lambda: rig.publisher(transport).publish(bad, rig.announce))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert rig.announced == []
    # However many ways there are, no other one could do better: a restart would not either.
    every_way = FallbackPublisher([rig.publisher(name) for name in TRANSPORTS])
    with pytest.raises(InvalidInput) as refused:
        await run(lambda: every_way.publish(bad, rig.announce))
    assert message in str(refused.value)


def _tensor(name: str, shape: tuple[int, ...], dtype: str = "F32") -> HostTensor:
    return HostTensor(name, shape, dtype, memoryview(np.zeros(shape, "f4")).cast("B"))


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("damage", ["truncated", "padded", "flipped", "reordered"])
async def test_stored_version_when_damaged_then_no_server_takes_it(
    rig: Rig, transport: str, damage: str
) -> None:
    version = await run(lambda: rig.publisher(transport).publish(rig.noisy(1), rig.announce))
    file = Path(version.path) / "model.safetensors"
    raw = bytearray(file.read_bytes())
    if damage == "truncated":
        raw = raw[:-100]
    elif damage == "padded":
        raw += b"\x00" * 8
    elif damage == "flipped":
        raw[-3] ^= 1
    else:  # two tensors of one shape change places: every byte is still there
        start = 8 + int.from_bytes(raw[:8], "little")
        places = [json.loads(raw[8:start])[f"model.layers.{i}.mlp.up_proj.weight"] for i in (0, 1)]
        one, two = (
            slice(*(start + offset for offset in place["data_offsets"])) for place in places
        )
        raw[one], raw[two] = raw[two], raw[one]
    file.write_bytes(raw)
    with pytest.raises(InvalidInput, match=r"digest|bytes|truncated"):
        rig.digests.verify(version)
    if damage == "padded" and transport == "stream":
        return  # over HTTP no one asks for what follows the last tensor
    with pytest.raises((WeightError, TransportError)):
        await run(lambda: rig.load(rig.location(transport, version)))
    if damage == "padded":
        return
    location = rig.location("stream", version)
    with pytest.raises((InvalidInput, TransportError)):
        await run(lambda: fetch_version(location, HEADERS, rig.root / "memory"))
    assert not list((rig.root / "memory").glob("*"))


# ------------------------------------------------------------------ uploads


async def test_upload_when_chunks_are_wrong_then_refused_and_nothing_is_visible(rig: Rig) -> None:
    version = await run(lambda: rig.publisher("disk").publish(rig.noisy(1), rig.announce))
    raw = (Path(version.path) / "model.safetensors").read_bytes()
    config = (Path(version.path) / "config.json").read_bytes()
    manifest = json.loads((Path(version.path) / "manifest.json").read_text())
    manifest |= {"version": 2}
    name, half = version_name(2, 1), len(raw) // 2

    def upload() -> None:
        with StoreConnection(rig.url, HEADERS, 10.0) as store:
            with pytest.raises(TransportError, match="no upload was begun"):
                store.put(name, "config.json", [memoryview(config)], 0, len(config))
            store.begin(name, json.dumps(manifest))
            store.put(name, "config.json", [memoryview(config)], 0, len(config))
            for file in ("../x", "manifest.json", "other.safetensors"):
                with pytest.raises(TransportError, match="404"):
                    store.put(name, file, [memoryview(b"x")], 0, 1)
            with pytest.raises(TransportError, match="bytes"):
                store.put(name, "model.safetensors", [memoryview(raw)], 1, len(raw))
            # Reordered: each half at the other's place, each with a digest that is right.
            store.put(name, "model.safetensors", [memoryview(raw[half:])], 0, len(raw))
            store.put(
                name, "model.safetensors", [memoryview(raw[:half])], len(raw) - half, len(raw)
            )
            with pytest.raises(TransportError, match="400"):
                store.commit(name)
            # Truncated: the second half never comes.
            store.begin(name, json.dumps(manifest))
            store.put(name, "config.json", [memoryview(config)], 0, len(config))
            store.put(name, "model.safetensors", [memoryview(raw[:half])], 0, len(raw))
            with pytest.raises(TransportError, match=r"model\.safetensors: digest .*, expected"):
                store.commit(name)
            with pytest.raises(TransportError, match="not in the weight store"):
                store.manifest(name)
            store.put(name, "model.safetensors", [memoryview(raw[half:])], half, len(raw))
            assert Path(store.commit(name)).name == name
            assert store.manifest(name).files == version.files

    await run(upload)


async def test_upload_when_the_volume_is_full_then_refused_before_a_byte_is_sent(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:

    from areal_weight_sync.store import weights as weight_store

    usage = shutil.disk_usage(rig.root)
    monkeypatch.setattr(weight_store.shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(TransportError, match=r"507.*MiB free"):
        await run(lambda: rig.publisher("stream").publish(rig.noisy(1), rig.announce))
    with pytest.raises(CapacityExceeded):
        WeightStore(rig.root / "weights", rig.model).begin(
            build_manifest(rig.model, 1, 1), rig.base
        )


async def test_store_when_the_token_is_missing_then_gives_and_takes_nothing(rig: Rig) -> None:
    def try_it() -> None:
        with StoreConnection(rig.url, {}, 10.0) as store:
            with pytest.raises(TransportError, match="401"):
                store.manifest(version_name(0, 0))
            with pytest.raises(TransportError, match="401"):
                store.begin(version_name(1, 1), "{}")

    await run(try_it)


# ------------------------------------------------------------------ fallback


@pytest.mark.parametrize(("first", "second"), [("disk", "stream"), ("stream", "disk")])
async def test_transport_when_it_fails_then_the_next_one_carries_the_version(
    rig: Rig, first: str, second: str, capsys: pytest.CaptureFixture[str]
) -> None:
    blocked = rig.root / "blocked"
    blocked.write_text("a file where the folder should be")
    broken = {
        "disk": DiskPublisher(blocked / "weights"),
        "stream": StreamPublisher(f"http://127.0.0.1:{free_port()}", SECURITY, 2.0),
    }
    publisher = FallbackPublisher([broken[first], rig.publisher(second)])
    new = rig.noisy(1)
    version = await run(lambda: publisher.publish(new, rig.announce))
    same(await run(lambda: rig.load(rig.location(second, version))), new)
    said = capsys.readouterr().out
    assert "transport_fell_back" in said
    assert "cause" in said


async def test_transports_when_none_works_then_the_error_names_each(rig: Rig) -> None:
    blocked = rig.root / "blocked"
    blocked.write_text("")
    publisher = FallbackPublisher(
        [DiskPublisher(blocked / "weights"), StreamPublisher("", SECURITY, 2.0)]
    )
    with pytest.raises(TransportError, match=r"disk: .*blocked.*; stream: .*weight_store"):
        await run(lambda: publisher.publish(rig.noisy(1), rig.announce))


# ------------------------------------------------------------------ weight-sync's side


class FolderEngine:
    """An engine as SGLang is one: loads folders, only those below `sees`; knows no preparing."""

    def __init__(self, sees: Path) -> None:
        self.sees = sees
        self.loaded: list[str] = []

    async def start(self) -> web.AppRunner:
        async def update(request: web.Request) -> web.Response:
            body = await request.json()
            if not Path(body["model_path"]).is_relative_to(self.sees):
                message = f"{body['model_path']}: no such folder"
                return web.json_response({"success": False, "message": message}, status=400)
            self.loaded.append(body["model_path"])
            return web.json_response({"success": True, "message": "ok"})

        app = web.Application()
        app.add_routes([web.post("/update_weights_from_disk", update)])
        return await serve(app, free_port())


async def serve(app: web.Application, port: int) -> web.AppRunner:
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    return runner


async def test_server_when_it_cannot_see_the_folder_then_its_sidecar_pulls(rig: Rig) -> None:
    version = await run(lambda: rig.publisher("disk").publish(rig.noisy(1), rig.announce))
    engine = FolderEngine(rig.root / "memory")
    sidecar_port = free_port()
    runners = [
        await engine.start(),
        await serve(Sidecar(rig.root / "memory", SECURITY).application(), sidecar_port),
    ]
    try:
        url = "http://{}:{}".format(*runners[0].addresses[0])
        async with open_session(HEADERS) as session:
            routes = Routes(("disk", "stream"), rig.url, sidecar_port)
            client = HttpEngine(url, session, routes=routes)
            for number in (1, 2):  # the second time it knows which way works
                version = await run(
                    lambda n=number: rig.publisher("disk").publish(rig.noisy(n), rig.announce)
                )
                await client.stage(version, timeout=60.0)
                await client.load(version, flush_cache=False, timeout=60.0)
                assert engine.loaded[-1] == str(rig.root / "memory" / version_name(number, 1))
            lonely = HttpEngine(url, session, routes=Routes(("stream", "disk"), rig.url, 1))
            await lonely.stage(version, timeout=60.0)  # left for the load
            with pytest.raises(EngineError, match=r"disk: .*no such folder.*; stream: .*sidecar"):
                await lonely.load(version, flush_cache=False, timeout=60.0)
    finally:
        for runner in runners:
            await runner.cleanup()


async def test_version_when_a_retired_folder_is_reused_then_nothing_else_of_it_stays(
    rig: Rig,
) -> None:
    spare = rig.root / "weights" / SPARE
    spare.mkdir(parents=True)
    stale = {"model-00001-of-00002.safetensors", "model.safetensors.index.json", "notes.txt"}
    for name in stale:
        (spare / name).write_bytes(b"of another version")
    (spare / "model.safetensors").write_bytes(b"x" * 100)
    new = rig.noisy(1)
    version = await run(lambda: rig.publisher("disk").publish(new, rig.announce))
    assert not spare.exists(), "it was reused"
    names = {file.name for file in await run(lambda: list(Path(version.path).iterdir()))}
    assert names.isdisjoint(stale)
    same(await run(lambda: rig.load(version.path)), new)


async def test_upload_when_the_store_drops_a_block_then_it_is_sent_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, dropped = StoreConnection.put, []

    def drop_first(self: StoreConnection, name: str, file: str, *rest: Any) -> None:
        if file not in dropped:
            dropped.append(file)
            raise TransportError("the connection was closed")
        put(self, name, file, *rest)

    monkeypatch.setattr(StoreConnection, "put", drop_first)
    new = rig.noisy(1)
    version = await run(lambda: rig.publisher("stream").publish(new, rig.announce))
    assert set(dropped) == {"config.json", "model.safetensors"}
    same(await run(lambda: rig.load(rig.location("stream", version))), new)
