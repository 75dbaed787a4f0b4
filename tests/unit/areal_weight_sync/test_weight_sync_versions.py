"""Versions as the coordinator keeps them: published, refused, superseded, collected, taken over."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import structlog
from tests.unit.areal_weight_sync.coordinator_rig import JOINING, SERVING, rig_of
from tests.unit.areal_weight_sync.weight_sync_fakes import publish_folder

from areal.errors import InvalidInput, StaleIncarnation, Unavailable, WrongStep
from areal.weights.manifest import PolicyVersion
from areal_weight_sync.interfaces import Snapshot
from areal_weight_sync.server_state import ServerRecord


async def test_version_when_superseded_while_it_is_verified_then_no_complaint(tmp_path):
    """A server that comes back finds the folder collected that it was about to load."""
    gate = threading.Event()
    async with rig_of(tmp_path) as rig:
        await rig.serving("a")
        digests, verify = rig.coordinator.digests, rig.coordinator.digests.verify
        asked = []

        def slow(version: PolicyVersion) -> None:
            asked.append(version.version)
            if asked == [1, 1]:  # the first is for publishing, the second the member's
                gate.wait(60.0)
                raise InvalidInput("config.json: No such file or directory")
            verify(version)

        digests.verify = slow
        with structlog.testing.capture_logs() as logs:
            await rig.publish(1)
            await rig.until(lambda: asked.count(1) == 2, "verification by the member")
            await rig.publish(2)
            gate.set()
            await rig.at("a", SERVING, 2)
        assert "version_unusable" not in [line["event"] for line in logs]


async def test_publish_when_repeated_older_or_stale_then_idempotent_or_refused(tmp_path):
    async with rig_of(tmp_path) as rig:
        await rig.publish_model()
        folder = publish_folder(rig.root, 2, 3)
        assert await rig.coordinator.publish(folder) == 2
        assert await rig.coordinator.publish(folder) == 2
        assert rig.coordinator.status().updates == 1
        with pytest.raises(WrongStep):
            await rig.publish(1, 3)
        with pytest.raises(StaleIncarnation):
            await rig.publish(3, 2)
        assert rig.coordinator.status().current_version == 2


async def test_publish_when_files_are_wrong_then_refused_and_no_server_is_touched(tmp_path):
    async with rig_of(tmp_path) as rig:
        await rig.serving("a")
        torn = publish_folder(rig.root, 1)
        file = Path(torn.path) / "model.safetensors"
        raw = bytearray(file.read_bytes())
        raw[-1] ^= 1
        file.write_bytes(raw)
        with pytest.raises(InvalidInput, match="digest"):
            await rig.coordinator.publish(torn)
        with pytest.raises(InvalidInput, match=r"norm.weight has shape \[5\], expected \[4\]"):
            await rig.coordinator.publish(
                publish_folder(
                    rig.root,
                    2,
                    shapes={"model.embed_tokens.weight": (16, 4), "model.norm.weight": (5,)},
                )
            )
        with pytest.raises(InvalidInput, match="absolute"):
            await rig.coordinator.publish(PolicyVersion(3, 1, "weights/v3"))
        assert rig.coordinator.status().current_version == 0
        assert not any(c in rig.engine("a").calls for c in ("load 1", "load 2", "load 3"))
        assert rig.server("a").state is SERVING


async def test_files_when_changed_after_publish_then_newcomer_waits_with_the_cause(tmp_path):
    async with rig_of(tmp_path) as rig:
        await rig.publish_model()
        version = publish_folder(rig.root, 1)
        await rig.coordinator.publish(version)
        file = Path(version.path) / "model.safetensors"
        whole = file.read_bytes()
        file.write_bytes(whole[:-4])
        rig.register("a")
        await rig.until(lambda: "truncated" in rig.server("a").cause, "the cause")
        assert rig.server("a").state is JOINING
        assert "load 1" not in rig.engine("a").calls
        file.write_bytes(whole)
        await rig.at("a", SERVING, 1)


async def test_old_folders_when_all_servers_moved_on_then_deleted(tmp_path):
    async with rig_of(tmp_path) as rig:
        rig.register("a", "b")
        await rig.publish_model()
        for version in (1, 2, 3):
            await rig.publish(version)
            await rig.at("a", SERVING, version)
            await rig.at("b", SERVING, version)
        await rig.until(
            lambda: (
                sorted(f.name for f in rig.root.iterdir())
                == [".spare", "v00000002-inc1", "v00000003-inc1"]
            ),
            "two folders and the spare",
        )
        assert rig.model.is_dir()


async def test_takeover_when_servers_are_at_the_version_then_confirmed_without_reload(tmp_path):
    async with rig_of(tmp_path) as rig:
        engine = rig.engine("a")
        engine.version, engine.weights, engine.boot = "0", "w0", "boot-9"
        engine.paused = True  # the coordinator before died in the middle
        from areal.weights.manifest import build_manifest

        base = build_manifest(rig.model, 0, 0)
        record = ServerRecord("a", "http://a", version=0, boot_id="boot-9")
        rig.coordinator.start(Snapshot(current=base, base=base, records=[record]))
        assert rig.server("a").state is JOINING
        await rig.at("a", SERVING, 0)
        assert "load 0" not in engine.calls
        assert not engine.paused


async def test_publish_when_only_the_store_knows_of_it_then_the_next_trainer_brings_servers_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with rig_of(tmp_path) as rig:
        await rig.serving("a")
        stored = rig.store.publish

        async def answer_lost(version: PolicyVersion) -> None:
            await stored(version)
            raise Unavailable("redis: Connection reset")

        monkeypatch.setattr(rig.store, "publish", answer_lost)
        with pytest.raises(Unavailable):
            await rig.publish(1, incarnation=1)
        monkeypatch.setattr(rig.store, "publish", stored)
        assert await rig.publish(1, incarnation=2) == 1
        await rig.at("a", SERVING, 1)
        assert rig.store.current == rig.coordinator._current
