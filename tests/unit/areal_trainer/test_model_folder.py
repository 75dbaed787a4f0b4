"""When a model's folder is whole, and when it is ready."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.model_files import model_files, safetensors

from areal_trainer.model_folder import INDEX, lacks, mark_ready, ready_file, ready_from


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    folder.mkdir()
    for name, content in model_files().items():
        (folder / name).write_bytes(content)
    return folder


def test_model_when_it_is_whole_then_it_lacks_nothing(model: Path) -> None:
    assert lacks(model) == ""


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_model_when_a_file_is_missing_or_shortened_then_it_is_named(model: Path, name: str) -> None:
    content = (model / name).read_bytes()
    for length in (len(content) - 1, len(content) // 2, 5, 0):
        (model / name).write_bytes(content[:length])
        assert name in lacks(model), length
    (model / name).unlink()
    word = "weights" if name == "model.safetensors" else name
    assert word in lacks(model)


def test_model_when_it_has_shards_then_each_is_asked_for(model: Path) -> None:
    names = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    (model / "model.safetensors").unlink()
    (model / INDEX).write_text(json.dumps({"weight_map": {f"w{n}": n for n in names}}))
    for name in names[:2]:
        (model / name).write_bytes(safetensors(10))
    assert lacks(model) == f"no {names[2]} (2 of 3 files)"
    (model / names[2]).write_bytes(safetensors(10)[:-1])
    assert names[2] in lacks(model)
    (model / names[2]).write_bytes(safetensors(10))
    assert lacks(model) == ""


def test_ready_when_it_is_marked_then_its_source_is_known(model: Path) -> None:
    assert ready_from(model) is None
    mark_ready(model, "hf://lab/tiny@v1")
    assert ready_from(model) == "hf://lab/tiny@v1"
    (model / "config.json").unlink()
    assert ready_from(model) is None, "somebody has removed it"


def test_ready_when_the_file_is_empty_then_the_model_is_ready_from_nowhere_known(
    model: Path,
) -> None:
    ready_file(model).touch()
    assert ready_from(model) == ""


def test_model_when_links_were_copied_in_place_of_files_then_it_says_so(model: Path) -> None:
    """So the Hub's cache arrives that is copied as it is."""
    (model / "config.json").unlink()
    (model / "config.json").symlink_to("../../blobs/0123")
    assert "config.json is a broken link" in lacks(model)
