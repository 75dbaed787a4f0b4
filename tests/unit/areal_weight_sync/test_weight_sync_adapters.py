"""Versions that are adapters: loaded beside version 0, probed, named, unloaded."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.unit.areal_weight_sync.coordinator_rig import QUARANTINED, SERVING, Rig, rig_of
from tests.unit.areal_weight_sync.weight_sync_fakes import write_safetensors

from areal.errors import InvalidInput
from areal.protocol.versions import (
    server_from_pb,
    server_to_pb,
    version_from_pb,
    version_to_pb,
)
from areal.weights.adapters import adapter_config, assemble_adapter
from areal.weights.manifest import (
    ADAPTER_CONFIG,
    ADAPTER_FILE,
    AdapterInfo,
    PolicyVersion,
    WeightFile,
    WeightTensor,
    build_manifest,
    to_json,
    version_dir,
    write_manifest,
)
from areal.weights.safetensors import read_layout, tensor_digests
from areal.weights.servers import InferenceServer
from areal_weight_sync.engine.base import EngineError, Fault
from areal_weight_sync.interfaces import Snapshot
from areal_weight_sync.server_state import ServerRecord


def publish_adapter(
    rig: Rig, version: int, incarnation: int = 1, *, size: float = 0.0, **info: object
) -> PolicyVersion:
    """Rank 1, for the first matrix of the model."""
    base = build_manifest(rig.model, 0, 0)
    matrix = next(t for t in base.tensors if len(t.shape) == 2)
    module = matrix.name.removesuffix(".weight")
    arrays = {
        f"base_model.model.{module}.lora_A.weight": np.full((1, matrix.shape[1]), version, "f4"),
        f"base_model.model.{module}.lora_B.weight": np.full((matrix.shape[0], 1), size, "f4"),
    }
    folder = version_dir(rig.root, version, incarnation)
    folder.mkdir()
    write_safetensors(folder / ADAPTER_FILE, arrays)
    layout = read_layout(folder / ADAPTER_FILE)
    digests = tensor_digests(folder / ADAPTER_FILE, layout)
    values = {"rank": 1, "alpha": 1, "base_digest": base.digest, "size": size, **info}
    described = AdapterInfo(**values)
    (folder / ADAPTER_CONFIG).write_bytes(adapter_config(described, arrays))
    manifest = assemble_adapter(
        folder,
        version,
        incarnation,
        WeightFile(ADAPTER_FILE, layout.size_bytes, layout.file_digest(digests)),
        [WeightTensor(p.name, p.shape, p.dtype, digests[p.name]) for p in layout.places],
        described,
    )
    write_manifest(manifest, folder)
    return manifest


async def step(rig: Rig, version: int, size: float = 1.0, **info: object) -> PolicyVersion:
    made = publish_adapter(rig, version, size=size + version, **info)
    await rig.coordinator.publish(made)
    return made


async def test_adapter_when_published_then_served_beside_version_0_without_a_pause(
    tmp_path: Path,
) -> None:
    async with rig_of(tmp_path) as rig:
        await rig.serving("a", "b")
        for name in "ab":
            rig.engine(name).calls.clear()
            rig.engine(name).requests = 3
        made = await step(rig, 1)
        for name in "ab":
            await rig.at(name, SERVING, 1)
            engine = rig.engine(name)
            await rig.until(lambda engine=engine: not engine.requests, "old requests to end")
            assert rig.server(name).adapter == made.adapter_name == "v00000001-inc1"
            assert "pause" not in engine.calls, engine.calls
            assert "load 0" not in engine.calls, "it holds version 0 already"
            assert (engine.version, engine.weights) == ("0", "w0"), "the weights are version 0"
            assert engine.aborts == 3, "they continue with the new name"
            calls = engine.calls
            assert calls.index("abort_all") < calls.index(f"logprobs {made.adapter_name}")


async def test_adapters_when_twenty_are_published_then_no_more_than_three_are_loaded(
    tmp_path: Path,
) -> None:
    async with rig_of(tmp_path) as rig:
        await rig.serving("a")
        rig.engine("a").loaded["someone-elses"] = 0.5
        before = ""
        for version in range(1, 21):
            made = await step(rig, version, before=before, change=1.0)
            await rig.at("a", SERVING, version)
            keep = {made.adapter_name, "someone-elses", before} - {""}
            await rig.until(lambda keep=keep: set(rig.engine("a").loaded) == keep, "the others")
            before = made.adapter_name
        assert rig.engine("a").most_loaded <= 4


async def test_server_when_it_joins_or_restarts_then_it_gets_version_0_and_the_adapter(
    tmp_path: Path,
) -> None:
    async with rig_of(tmp_path) as rig:
        await rig.serving("a")
        made = await step(rig, 1)
        await rig.at("a", SERVING, 1)
        rig.register("b")
        await rig.at("b", SERVING, 1)
        calls = rig.engine("b").calls
        assert calls.index("load 0") < calls.index(f"load_adapter {made.adapter_name}")
        rig.engine("a").restart("boot-2", "0")
        await rig.until(lambda: made.adapter_name in rig.engine("a").loaded, "the adapter again")
        await rig.at("a", SERVING, 1)
        assert rig.engine("a").weights == "w0"


@pytest.mark.parametrize("computes_with", ["", "v00000001-inc1"])
async def test_server_when_it_computes_without_the_adapter_or_with_the_one_before_then_found(
    tmp_path: Path, computes_with: str
) -> None:
    async with rig_of(tmp_path) as rig:
        await rig.serving("a", "b")
        first = await step(rig, 1)
        for name in "ab":
            await rig.at(name, SERVING, 1)
        rig.engine("b").applies = lambda name: computes_with if "02-inc" in name else name
        await step(rig, 2, before=first.adapter_name, change=1.0)
        await rig.at("a", SERVING, 2)
        await rig.at("b", QUARANTINED)
        cause = rig.server("b").cause
        assert "ignores adapter v00000002-inc1" in cause or "not up" in cause, cause
        rig.engine("b").applies = lambda name: name
        await rig.at("b", SERVING, 2)


async def test_server_when_alone_and_it_ignores_adapters_then_it_never_serves_one(
    tmp_path: Path,
) -> None:
    async with rig_of(tmp_path) as rig:
        await rig.serving("a")
        rig.engine("a").applies = lambda _: ""
        await step(rig, 1)
        await rig.at("a", QUARANTINED)
        assert rig.coordinator.status().confirmed_version == 0


async def test_server_when_it_took_an_adapter_and_does_not_list_it_then_quarantined(
    tmp_path: Path,
) -> None:
    async with rig_of(tmp_path) as rig:
        await rig.serving("a")
        rig.engine("a").lists = False
        await step(rig, 1)
        await rig.at("a", QUARANTINED)


async def test_adapter_when_it_changes_nothing_then_the_probe_does_not_expect_a_change(
    tmp_path: Path,
) -> None:
    async with rig_of(tmp_path) as rig:
        await rig.serving("a")
        zero = publish_adapter(rig, 1)
        await rig.coordinator.publish(zero)
        await rig.at("a", SERVING, 1)
        same = publish_adapter(rig, 2, before=zero.adapter_name)  # a skipped step
        await rig.coordinator.publish(same)
        await rig.at("a", SERVING, 2)
        assert not rig.observer.failures


async def test_server_when_it_has_no_adapter_routes_then_its_cause_says_so(tmp_path: Path) -> None:
    async with rig_of(tmp_path) as rig:
        await rig.serving("a")
        rig.engine("a").load_error = EngineError(
            Fault.UPDATE_REFUSED, "/load_lora_adapter: LoRA is not enabled"
        )
        await step(rig, 1)
        await rig.at("a", QUARANTINED)
        assert "LoRA is not enabled" in rig.server("a").cause


async def test_versions_when_adapters_and_whole_weights_alternate_then_each_is_what_is_served(
    tmp_path: Path,
) -> None:
    async with rig_of(tmp_path) as rig:
        await rig.serving("a")
        await step(rig, 1)
        await rig.at("a", SERVING, 1)
        await rig.publish(2)
        await rig.at("a", SERVING, 2)
        assert (rig.server("a").adapter, rig.engine("a").weights) == ("", "w2")
        await step(rig, 3)
        await rig.at("a", SERVING, 3)
        assert rig.engine("a").weights == "w0"
        assert rig.server("a").adapter == "v00000003-inc1"


async def test_version_when_made_again_by_the_next_trainer_then_its_adapter_has_another_name(
    tmp_path: Path,
) -> None:
    async with rig_of(tmp_path) as rig:
        await rig.serving("a")
        await step(rig, 1)
        await rig.at("a", SERVING, 1)
        again = publish_adapter(rig, 1, incarnation=2, size=9.0)
        await rig.coordinator.publish(again)
        await rig.until(lambda: rig.server("a").adapter == again.adapter_name, "the new one")
        await rig.at("a", SERVING, 1)
        await rig.until(lambda: list(rig.engine("a").loaded) == [again.adapter_name], "only it")


async def test_weight_sync_when_started_again_then_the_adapter_is_confirmed_and_not_loaded_again(
    tmp_path: Path,
) -> None:
    async with rig_of(tmp_path) as rig:
        await rig.serving("a")
        made = await step(rig, 1)
        await rig.at("a", SERVING, 1)
        record, base = rig.coordinator.record("a"), rig.coordinator.base
        assert ServerRecord.from_json(record.to_json()).adapter == made.adapter_name
        engine = rig.engines["a"]
    (tmp_path / "next").mkdir()
    engine.calls.clear()
    snapshot = Snapshot(made, base, [ServerRecord.from_json(record.to_json())])
    async with rig_of(tmp_path / "next") as rig:
        rig.engines["a"] = engine
        rig.coordinator.start(snapshot)
        await rig.at("a", SERVING, 1)
        assert not [call for call in engine.calls if call.startswith("load")], engine.calls
        assert "abort_all" not in engine.calls, "its requests run on"
        assert rig.server("a").adapter == made.adapter_name


async def test_adapter_when_its_files_or_its_base_are_wrong_then_publishing_is_refused(
    tmp_path: Path,
) -> None:
    async with rig_of(tmp_path) as rig:
        await rig.serving("a")
        torn = publish_adapter(rig, 1, size=1.0)
        with (Path(torn.path) / ADAPTER_FILE).open("r+b") as file:
            file.seek(-2, 2)
            file.write(b"xx")
        with pytest.raises(InvalidInput, match="not the one that was published"):
            await rig.coordinator.publish(torn)
        other = publish_adapter(rig, 2, size=1.0, base_digest="0" * 32)
        with pytest.raises(InvalidInput, match=r"model\.path was changed"):
            await rig.coordinator.publish(other)
        assert rig.server("a").state is SERVING


async def test_adapter_when_it_is_hostile_or_there_is_no_version_0_then_one_line_says_so(
    tmp_path: Path,
) -> None:
    async with rig_of(tmp_path) as rig:
        made = publish_adapter(rig, 1, size=1.0)
        with pytest.raises(InvalidInput, match="expected version 0"):
            await rig.coordinator.publish(made)
        await rig.serving("a")
        assert made.adapter is not None
        for change, said in (
            ({"size": float("nan")}, "expected finite numbers"),
            ({"change": float("inf")}, "expected finite numbers"),
            ({"size": -1.0}, "expected finite numbers"),
            ({"rank": -1}, "expected 1 or more"),
            ({"base_digest": ""}, "expected its files and a base_digest"),
        ):
            bad = replace(made, adapter=replace(made.adapter, **change))
            with pytest.raises(InvalidInput, match=said):
                await rig.coordinator.publish(bad)
        zero = replace(made, version=0)
        with pytest.raises(InvalidInput, match="expected version 0"):
            await rig.coordinator.publish(zero)
        with pytest.raises(InvalidInput, match="expected its files"):
            await rig.coordinator.publish(replace(made, files=()))
        await rig.coordinator.publish(made)
        await rig.at("a", SERVING, 1)


async def test_server_when_started_for_a_lower_rank_then_refused_before_the_first_version(
    tmp_path: Path,
) -> None:
    async with rig_of(tmp_path, adapter_rank=16) as rig:
        rig.engine("a").lora_rank, rig.engine("b").lora_rank = 8, 16
        rig.register("a", "b", "c")
        await rig.publish_model()
        await rig.at("b", SERVING, 0)
        for name, started in (("a", "8"), ("c", "none")):
            await rig.at(name, QUARANTINED)
            cause = rig.server(name).cause
            assert f"was started for {started}: expected --enable-lora --max-lora-rank 16" in cause


def test_manifest_when_of_an_adapter_then_digest_depends_on_rank_alpha_and_base() -> None:
    tensors = (WeightTensor("base_model.model.m.lora_A.weight", (1, 2), "F32", "aa"),)
    digests = {
        PolicyVersion(1, 1, "/x", tensors=tensors, adapter=info).digest
        for info in (None, AdapterInfo(1, 1, "b"), AdapterInfo(1, 2, "b"), AdapterInfo(1, 1, "c"))
    }
    assert len(digests) == 4
    assert "adapter" in json.loads(to_json(PolicyVersion(1, 1, "/x")))


def test_adapter_when_sent_over_the_wire_then_nothing_of_it_is_lost() -> None:
    info = AdapterInfo(8, 16, "aa", size=0.5, before="v00000001-inc1", change=0.25)
    version = PolicyVersion(2, 1, "/weights/v00000002-inc1", adapter=info)
    assert version_from_pb(version_to_pb(version)).adapter == info
    assert version_from_pb(version_to_pb(replace(version, adapter=None))).adapter is None
    server = InferenceServer("a:1", "http://a:1", SERVING, 2, adapter=version.adapter_name)
    assert server_from_pb(server_to_pb(server)) == server
