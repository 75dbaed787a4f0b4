"""An adapter by every transport that keeps versions: read back by a server and by a sidecar."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.contract.transport_rig import HEADERS, TRANSPORTS, Rig, run

from areal.errors import InvalidInput
from areal.weights.adapters import check_against
from areal.weights.delta import DeltaChain
from areal.weights.fetch import fetch_version
from areal.weights.manifest import (
    ADAPTER_CONFIG,
    ADAPTER_FILE,
    AdapterInfo,
    PolicyVersion,
    read_manifest,
)
from areal.weights.publisher import NewVersion, TransportError
from areal_inference.model.adapters import Pair, read_adapter
from areal_torch.engines.export.publishing import host_tensors

MODULE = "model.layers.1.self_attn.q_proj"


def adapter(rig: Rig, version: int, **info: object) -> NewVersion:
    """Rank 3 and alpha 6 for one matrix."""
    shape = next(t.shape for t in rig.base.tensors if t.name == f"{MODULE}.weight")
    generator = torch.Generator().manual_seed(version)
    tensors = [
        (f"base_model.model.{MODULE}.lora_A.weight", torch.randn(3, shape[1], generator=generator)),
        (f"base_model.model.{MODULE}.lora_B.weight", torch.randn(shape[0], 3, generator=generator)),
    ]
    described = AdapterInfo(**{"rank": 3, "alpha": 6, "base_digest": rig.base.digest, **info})
    return NewVersion(version, 1, host_tensors(tensors), rig.model, adapter=described)


def announce(rig: Rig, version: PolicyVersion) -> None:
    """What PublishVersion does."""
    rig.digests.verify(version)
    check_against(version, rig.base)
    rig.announced.append(version)


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def retire(folder: Path) -> None:
    """As weight-sync does with versions that no one needs."""
    folder.rename(folder.with_name(".spare"))


def check(pairs: dict[str, Pair], new: NewVersion) -> None:
    """Bit for bit what was published."""
    down, up = (
        torch.frombuffer(bytearray(t.data), dtype=torch.float32).view(t.shape) for t in new.tensors
    )
    assert list(pairs) == [MODULE]
    assert torch.equal(pairs[MODULE].down, down.t())
    assert torch.equal(pairs[MODULE].up, up.t() * 2)


@pytest.mark.parametrize("chain", [False, True])
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_adapter_when_published_then_servers_and_sidecars_read_the_trainers_bits(
    rig: Rig, tmp_path: Path, transport: str, chain: bool
) -> None:
    publisher = rig.publisher(transport, DeltaChain() if chain else None)
    for number in (1, 2):
        new = adapter(rig, number)
        version = await run(lambda new=new: publisher.publish(new, lambda v: announce(rig, v)))
        folder = Path(version.path)
        held = names(folder)
        assert held == [ADAPTER_CONFIG, ADAPTER_FILE, "manifest.json"], "nothing of the model"
        assert read_manifest(folder).adapter == new.adapter
        config = json.loads((folder / ADAPTER_CONFIG).read_bytes())
        assert (config["r"], config["lora_alpha"], config["target_modules"]) == (3, 6, ["q_proj"])
        assert version.delta is None
        where = rig.location(transport, version)
        check(await run(lambda where=where: read_adapter(where, HEADERS, torch.float32, 3)), new)
        if transport == "stream":
            got = await run(lambda where=where: fetch_version(where, HEADERS, tmp_path / "sidecar"))
            check(await run(lambda got=got: read_adapter(got.path, {}, torch.float32, 3)), new)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_adapter_when_it_follows_whole_weights_then_no_file_of_theirs_is_in_its_folder(
    rig: Rig, transport: str
) -> None:
    publisher = rig.publisher(transport)
    whole = await run(lambda: publisher.publish(rig.noisy(1), rig.announce))
    retire(Path(whole.path))
    new = adapter(rig, 2)
    version = await run(lambda: publisher.publish(new, lambda v: announce(rig, v)))
    assert "model.safetensors" not in names(Path(version.path))
    check(await run(lambda: read_adapter(version.path, {}, torch.float32, 3)), new)


async def test_adapter_when_the_store_has_another_version_0_then_refused_before_the_upload(
    rig: Rig,
) -> None:
    new = adapter(rig, 1, base_digest="0" * 32)
    with pytest.raises(TransportError, match=r"model\.path was changed"):
        await run(lambda: rig.publisher("stream").publish(new, rig.announce))
    assert not list(rig.root.glob("weights/v*"))


def test_adapter_when_damaged_or_of_a_higher_rank_then_a_server_refuses_it(rig: Rig) -> None:
    new = adapter(rig, 1)
    version = rig.publisher("disk").publish(new, lambda v: announce(rig, v))
    folder = Path(version.path)
    with pytest.raises(InvalidInput, match="expected 1 to 2"):
        read_adapter(version.path, {}, torch.float32, 2)
    config = json.loads((folder / ADAPTER_CONFIG).read_bytes())
    for change, said in (
        ({"r": True}, "expected 1 to 8"),
        ({"r": 4}, "expected 4"),
        ({"lora_alpha": "x"}, "expected a number above 0"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save: not supported"),
        ({"use_dora": True}, "use_dora: not supported"),
    ):
        (folder / ADAPTER_CONFIG).write_text(json.dumps({**config, **change}))
        with pytest.raises(InvalidInput, match=said):
            read_adapter(version.path, {}, torch.float32, 8)
    for text in ("", "[]", "{", "{}", "[" * 100_000):
        (folder / ADAPTER_CONFIG).write_text(text)
        with pytest.raises(InvalidInput, match="expected a JSON object with r and lora_alpha"):
            read_adapter(version.path, {}, torch.float32, 8)
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config))
    raw = bytearray((folder / ADAPTER_FILE).read_bytes())
    raw[-1] ^= 1
    (folder / ADAPTER_FILE).write_bytes(raw)
    with pytest.raises(InvalidInput, match="is not the one that was published"):
        read_adapter(version.path, {}, torch.float32, 8)
    (folder / ADAPTER_FILE).unlink()
    with pytest.raises(InvalidInput):
        read_adapter(version.path, {}, torch.float32, 8)
    assert replace(new, adapter=None).weights_file == "model.safetensors"
