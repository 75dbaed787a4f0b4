"""Versions in an object store, against a real S3 server: whole or not there, and right."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.contract.transport_rig import Rig, run, same
from tests.ports import free_port
from tests.s3_server import BUCKET, S3Server, start_s3, use

from areal.config.experiment import GRPOConfig
from areal.errors import InvalidInput
from areal.weights import objects
from areal.weights.fetch import fetch_model, fetch_version
from areal.weights.manifest import PolicyVersion, build_manifest
from areal.weights.objects import ObjectPublisher, ObjectStore
from areal.weights.publisher import TransportError
from areal_launch.doctor.preflight import weights_problem
from areal_torch.publish.fallback import FallbackPublisher
from areal_weight_sync.versions import collect_objects

URL = f"s3://{BUCKET}/arithmetic/seed-1"


@pytest.fixture
def s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    with start_s3(tmp_path / "s3", monkeypatch) as server:
        yield server


async def publish(rig: Rig, number: int) -> PolicyVersion:
    return await run(lambda: ObjectPublisher(URL).publish(rig.noisy(number), rig.announce))


async def test_version_when_published_then_servers_hold_the_trainers_bits(
    s3: S3Server, rig: Rig
) -> None:
    spare = None
    for number in (1, 2):
        version = await publish(rig, number)
        assert version.path == f"{URL}/v{number:08}-inc1"
        loaded = await run(lambda at=version.path, into=spare: rig.load(at, into))
        same(loaded, rig.noisy(number))
        assert loaded.checksums() == {t.name: t.digest for t in version.tensors}
        spare = loaded
    folder = Path((await run(lambda: fetch_version(version.path, {}, rig.root / "memory"))).path)
    assert build_manifest(folder, 2, 1).files == version.files
    model = rig.root / "model-2"
    count = await run(lambda: fetch_model(version.path, {}, model))
    assert count == len(list(model.iterdir()))
    assert (model / "tokenizer.json").read_bytes() == (rig.model / "tokenizer.json").read_bytes()
    held = await run(ObjectStore(URL).versions)
    assert [v.path for v in held] == [f"{URL}/v{n:08}-inc1" for n in (1, 2)]


async def test_version_when_the_trainer_comes_again_then_it_is_not_uploaded_twice(
    s3: S3Server, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was killed between its upload and the announcement."""
    first = await publish(rig, 1)
    monkeypatch.setattr(ObjectStore, "put_weights", lambda *_: pytest.fail("uploaded again"))
    assert (await publish(rig, 1)).files == first.files
    changed = rig.noisy(2)
    other = type(changed)(1, 1, changed.tensors, rig.model)
    with pytest.raises(TransportError, match="holds a different version from the one published"):
        await run(lambda: ObjectPublisher(URL).publish(other, rig.announce))


@pytest.mark.parametrize("damage", ["flipped", "truncated", "missing"])
async def test_object_when_damaged_then_no_server_takes_it(
    s3: S3Server, rig: Rig, damage: str
) -> None:
    version = await publish(rig, 1)
    store, name = ObjectStore(URL), version.path.rpartition("/")[2]
    whole = bytearray(version.files[1].size_bytes)
    await run(lambda: store.read_into(name, "model.safetensors", 0, memoryview(whole)))
    if damage == "flipped":
        whole[-3] ^= 1
    if damage == "missing":
        await run(lambda: store.remove([f"{name}/model.safetensors"]))
    else:
        kept = bytes(whole if damage == "flipped" else whole[:-100])
        await run(lambda: store.put(f"{name}/model.safetensors", kept))
    with pytest.raises((InvalidInput, TransportError)) as refused:
        await run(lambda: rig.load(version.path))
    assert "\n" not in str(refused.value)
    with pytest.raises((InvalidInput, TransportError)):
        await run(lambda: fetch_version(version.path, {}, rig.root / "memory"))
    assert not list((rig.root / "memory").glob("v*"))
    if damage != "flipped":  # sizes are what weight-sync compares
        with pytest.raises(InvalidInput, match="bytes, expected"):
            store.check_whole(version)


async def test_versions_when_old_then_deleted_with_the_manifest_first(
    s3: S3Server, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (1, 2, 3, 4):
        await publish(rig, number)
    store = ObjectStore(URL)
    await run(lambda: store.put("v00000002-inc0/model.safetensors", b"of a killed trainer"))
    await run(lambda: store.put("v00000005-inc1/model.safetensors", b"being uploaded"))
    removed: list[str] = []
    remove = ObjectStore.remove

    def noted(self: ObjectStore, paths: list[str]) -> None:
        removed.extend(paths)
        remove(self, paths)

    monkeypatch.setattr(ObjectStore, "remove", noted)
    gone = await run(lambda: collect_objects(URL, 4, 2, [f"{URL}/v00000001-inc1"]))
    assert gone == ["v00000002-inc0", "v00000002-inc1"], "version 1 is being read"
    ours = [path for path in removed if path.startswith("v00000002-inc1")]
    assert ours[0] == "v00000002-inc1/manifest.json"
    assert len(ours) > 3
    left = await run(store.names)
    assert left == ["v00000001-inc1", *(f"v{n:08}-inc1" for n in (3, 4, 5))]


KILLED = """
import sys
from pathlib import Path
from areal.weights.manifest import PolicyVersion
from areal.weights.objects import ObjectPublisher
from areal.weights.publisher import NewVersion
from areal.weights.safetensors import HostTensor

data = memoryview(bytearray(1 << 20))
many = tuple(HostTensor(f"model.{n:04}", (1 << 18,), "F32", data) for n in range(600))
print("begins", flush=True)
ObjectPublisher(sys.argv[1]).publish(NewVersion(7, 1, many, Path(sys.argv[2])), print)
"""


async def test_trainer_when_killed_in_the_middle_of_an_upload_then_no_version_is_visible(
    s3: S3Server, rig: Rig
) -> None:
    def killed() -> None:
        with subprocess.Popen(
            [sys.executable, "-c", KILLED, URL, str(rig.model)], stdout=subprocess.PIPE
        ) as trainer:
            assert trainer.stdout is not None
            trainer.stdout.readline()
            log, deadline = s3.folder / s3.log, time.monotonic() + 90
            while "partNumber=3" not in log.read_text():
                assert time.monotonic() < deadline, log.read_text()[-2000:]
                assert trainer.poll() is None, "it was through before it was killed"
                time.sleep(0.01)
            os.kill(trainer.pid, signal.SIGKILL)

    await run(killed)
    store = ObjectStore(URL)
    assert await run(store.versions) == []
    assert await run(store.names) == ["v00000007-inc1"], "its first files are there"
    with pytest.raises(TransportError, match=r"v00000007-inc1/manifest\.json: NoSuchKey"):
        await run(lambda: rig.load(f"{URL}/v00000007-inc1"))
    assert await run(lambda: collect_objects(URL, 10, 2, [])) == []  # the newest stay, whole or not
    for number in (8, 9):
        await publish(rig, number)
    assert await run(lambda: collect_objects(URL, 9, 2, [])) == ["v00000007-inc1"]


async def test_store_when_away_for_a_while_then_the_upload_is_tried_again_until_it_is_back(
    s3: S3Server, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    use(monkeypatch, f"http://127.0.0.1:{port}")
    publishing = asyncio.create_task(publish(rig, 1))
    await asyncio.sleep(1.5)  # nothing listens meanwhile: that is the case, not a wait for one
    assert not publishing.done()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", s3.port)

        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            while data := await source.read(1 << 16):
                sink.write(data)
                await sink.drain()
            sink.close()

        await asyncio.gather(pump(reader, back), pump(there, writer), return_exceptions=True)

    async with await asyncio.start_server(relay, "127.0.0.1", port):
        version = await publishing
        same(await run(lambda: rig.load(version.path)), rig.noisy(1))


async def test_store_when_it_stays_away_then_one_line_and_the_next_way_carries_the_version(
    s3: S3Server, rig: Rig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(objects, "_RETRIED_FOR_S", 2.0)
    version = await publish(rig, 1)
    s3.kill()
    began = time.monotonic()
    with pytest.raises(TransportError, match=rf"^{URL}/v00000001-inc1/.*Connection refused$"):
        await run(lambda: rig.load(version.path))
    assert time.monotonic() - began < 30
    ways = FallbackPublisher([ObjectPublisher(URL), rig.publisher("stream")])
    second = await run(lambda: ways.publish(rig.noisy(2), rig.announce))
    same(await run(lambda: rig.load(rig.location("stream", second))), rig.noisy(2))
    said = capsys.readouterr().out
    assert "transport_fell_back" in said
    assert f"object store: {URL}" in said


async def test_credentials_when_wrong_then_one_line_before_anything_starts(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = GRPOConfig(experiment_name="test", trial_name="t")
    config.weight_sync.path = URL
    key = await run(s3.admit_only)
    use(monkeypatch, s3.endpoint, key)
    assert await run(lambda: weights_problem(config)) == ""
    assert await run(ObjectStore(URL).names) == [], "the probe leaves nothing"
    use(monkeypatch, s3.endpoint, ("AKIAWRONG", "wrong-secret"))
    why = await run(lambda: weights_problem(config))
    assert why.startswith(f"weight_sync.path '{URL}': cannot write, list and delete there: {URL}")
    assert "InvalidAccessKeyId" in why
    assert "\n" not in why
    use(monkeypatch, s3.endpoint, (key[0], "wrong-secret"))
    why = await run(lambda: weights_problem(config))
    assert "SignatureDoesNotMatch" in why
    assert "wrong-secret" not in why
    use(monkeypatch, s3.endpoint, key)
    config.weight_sync.path = "s3://there-is-none/x"
    assert "NoSuchBucket" in await run(lambda: weights_problem(config))
