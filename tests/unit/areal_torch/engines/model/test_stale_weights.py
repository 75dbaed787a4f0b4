"""Folders with weights of two models: read as transformers reads them, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from areal.errors import InvalidInput
from areal.weights.manifest import build_manifest, weight_files
from areal_torch.engines.export.directory import write_directory
from areal_torch.engines.model.tensor_directory import TensorDirectory
from areal_torch.models.tiny import make_tiny_model
from areal_trainer.model_folder import lacks

INDEX = "model.safetensors.index.json"
NORM = "model.norm.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    make_tiny_model(made, seed=0, num_hidden_layers=1, hidden_size=32, intermediate_size=64)
    return made


def with_norm(folder: Path, value: float) -> Any:
    """The folder's model with another norm."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    torch.nn.init.constant_(model.model.norm.weight, value)
    return model


def cut(folder: Path) -> set[str]:
    """Replaces the folder's single file by shards, as transformers writes them."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="20KB")
    shards = {file.name for file in folder.glob("model-*.safetensors")}
    assert len(shards) > 1
    assert not (folder / "model.safetensors").exists()
    return shards


def norm(folder: Path) -> float:
    with TensorDirectory(folder) as tensors:
        return float(tensors.read(NORM)[0])


def as_transformers(folder: Path) -> float:
    return float(AutoModelForCausalLM.from_pretrained(folder).model.norm.weight.detach()[0])


def test_folder_when_a_newer_single_file_is_beside_shards_then_refused_everywhere(
    folder: Path, tmp_path: Path
) -> None:
    cut(folder)
    with_norm(folder, 2.0).save_pretrained(tmp_path / "new")
    (tmp_path / "new" / "model.safetensors").rename(folder / "model.safetensors")
    for read in (weight_files, norm, lambda f: build_manifest(f, 0, 0)):
        with pytest.raises(InvalidInput, match=r"got both: .*delete model\.safetensors"):
            read(folder)
    assert "got both" in lacks(folder)


def test_folder_when_a_model_is_saved_over_shards_then_it_is_the_model(folder: Path) -> None:
    cut(folder)
    with_norm(folder, 2.0).save_pretrained(folder)
    assert (folder / INDEX).exists(), "transformers leaves the index of the shards"
    assert norm(folder) == as_transformers(folder) == 2.0
    assert lacks(folder) == ""
    manifest = build_manifest(folder, 0, 0)
    assert INDEX not in {file.name for file in manifest.files}


def test_folder_when_shards_are_saved_over_a_model_then_refused(folder: Path) -> None:
    with_norm(folder, 2.0).save_pretrained(folder, max_shard_size="20KB")
    assert (folder / "model.safetensors").exists(), "transformers leaves the single file"
    with pytest.raises(InvalidInput, match="got both"):
        weight_files(folder)


@pytest.mark.parametrize(
    "index",
    [
        b"{",
        b"\xff",
        b"[]",
        b'{"weight_map": [1]}',
        b'{"weight_map": {}}',
        b'{"weight_map": {"a": 1}}',
        b'{"weight_map": {"a": "../x.safetensors"}}',
        b'{"weight_map": {"a": "gone.safetensors", "b": "model.safetensors"}}',
        b'{"weight_map": {"a": "model.safetensors"}}',
    ],
)
def test_folder_when_an_unusable_index_is_beside_a_single_file_then_the_file_is_read(
    folder: Path, index: bytes
) -> None:
    (folder / INDEX).write_bytes(index)
    assert weight_files(folder) == [folder / "model.safetensors"]
    assert norm(folder) == as_transformers(folder)


@pytest.mark.parametrize("index", [b"{", b'{"weight_map": {}}', b'{"weight_map": {"a": "b"}}'])
def test_folder_when_an_unusable_index_is_alone_then_refused(folder: Path, index: bytes) -> None:
    (folder / "model.safetensors").unlink()
    (folder / INDEX).write_bytes(index)
    with pytest.raises(InvalidInput, match=INDEX):
        weight_files(folder)


@pytest.mark.parametrize("before", ["single", "shards", "both"])
@pytest.mark.parametrize("after", ["single", "shards"])
def test_save_when_the_folder_has_an_earlier_model_then_only_the_new_one_stays(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str, after: str
) -> None:
    model = with_norm(folder, 2.0)
    single = (folder / "model.safetensors").read_bytes()
    if before != "single":
        cut(folder)
    if before == "both":
        (folder / "model.safetensors").write_bytes(single)
    kept = folder / "model-notes.safetensors"
    kept.write_bytes(b"")
    if after == "shards":
        monkeypatch.setattr("areal_torch.engines.export.directory._SHARD_BYTES", 20_000)
    tensors = [(n, t) for n, t in model.state_dict().items() if n != "lm_head.weight"]
    write_directory(folder, tensors, model, folder)
    assert norm(folder) == as_transformers(folder) == 2.0
    assert (folder / "model.safetensors").exists() == (after == "single")
    assert (folder / INDEX).exists() == (after == "shards")
    files = {file.name for file in folder.glob("*.safetensors")} - {kept.name}
    assert kept.exists()
    if after == "shards":
        assert files == set(json.loads((folder / INDEX).read_text())["weight_map"].values())
