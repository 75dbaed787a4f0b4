"""Folders of old versions go once all who serve have moved on, unless a server reads one."""

from __future__ import annotations

from pathlib import Path

from tests.unit.areal_weight_sync.coordinator_rig import SERVING, SYNCING, rig_of
from tests.waiting import until

from areal.weights.manifest import version_dir


async def test_collection_when_a_server_still_loads_a_version_then_that_folder_stays(
    tmp_path: Path,
) -> None:
    async with rig_of(tmp_path, update_timeout_s=60.0) as rig:
        await rig.serving("a", "b")
        slow = rig.engine("b")
        slow.load_gate.clear()
        for version in (1, 2, 3, 4):  # two of them are kept
            await rig.publish(version)
            await rig.at("a", SERVING, version)
            await rig.at("b", SYNCING)  # at version 1, from the first one on
        folders = {version: version_dir(rig.root, version, 1) for version in (1, 2, 3, 4)}
        await until(lambda: not folders[2].exists(), "the end of version 2")
        assert [v for v, folder in folders.items() if folder.exists()] == [1, 3, 4]
        known = rig.coordinator.digests._digests
        await until(lambda: all(file.parent != folders[2] for file in known), "its digests' end")
        slow.load_gate.set()
        await rig.at("b", SERVING, 4)
        await rig.publish(5)
        await until(lambda: not folders[1].exists(), "the end of version 1")
