"""Checkpoint folders: exactly this model's tensors, or one line that says what is wrong."""

import gc
import json
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.inference_server import make_model

from areal_inference.decode.runner import ModelRunner
from areal_inference.model.config import ModelConfig
from areal_inference.model.kv_cache import KVCache
from areal_inference.model.transformer import Model
from areal_inference.model.weights import WeightError, load_weights

Q = "model.layers.1.self_attn.q_proj.weight"
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_model(tmp_path)
    return tmp_path


def load(folder: Path, dtype: torch.dtype = torch.float32):
    return load_weights(str(folder), ModelConfig.from_folder(folder), dtype)


def rewrite(folder: Path, change: Callable[[Tensors], Tensors]) -> None:
    file = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    save_file(change(tensors), file)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: {k: v for k, v in t.items() if k != Q}, f"tensor {Q} is missing"),
        (lambda t: t | {"model.extra": torch.zeros(2)}, "tensor model.extra is unknown"),
        (
            lambda t: t | {Q: t[Q][:-1].clone()},
            f"tensor {Q} has shape [63, 64], expected [64, 64]",
        ),
        (lambda t: t | {Q: t[Q].long()}, f"tensor {Q} has dtype I64"),
        (lambda t: t | {Q: t[Q].index_fill(0, torch.tensor(3), float("nan"))}, f"{Q} holds NaN"),
        (
            lambda t: t | {"lm_head.weight": t["model.embed_tokens.weight"] + 1},
            "lm_head.weight differs from model.embed_tokens.weight",
        ),
    ],
)
def test_load_when_a_tensor_is_wrong_then_refused_by_name(folder: Path, change, message: str):
    rewrite(folder, change)
    with pytest.raises(WeightError) as caught:
        load(folder)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_load_when_file_is_truncated_then_refused(folder: Path):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(WeightError, match=r"truncated or torn"):
        load(folder)


def test_load_when_file_is_missing_then_refused(folder: Path):
    (folder / "model.safetensors").unlink()
    with pytest.raises(WeightError, match=r"no model\.safetensors"):
        load(folder)


def test_load_when_tied_head_is_repeated_then_accepted(folder: Path):
    before = load(folder).checksums()
    rewrite(folder, lambda t: t | {"lm_head.weight": t["model.embed_tokens.weight"].clone()})
    assert load(folder).checksums() == before


def test_load_when_sharded_then_equal_to_one_file(folder: Path):
    single = load(folder).checksums()
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for shard, members in shards.items():
        save_file({name: tensors[name].clone() for name in members}, folder / shard)
    (folder / "model.safetensors").unlink()
    index = {name: shard for shard, members in shards.items() for name in members}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert load(folder).checksums() == single

    index[names[0]] = "../a.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    with pytest.raises(WeightError, match="not a file of this folder"):
        load(folder)


def test_checksums_when_loaded_then_are_those_of_the_checkpoint(folder: Path):
    """The digest of each tensor as stored equals that of the file: nothing was permuted away."""
    from areal.weights.safetensors import digest_of

    tensors = load_file(folder / "model.safetensors")
    expected = {n: digest_of(t.numpy().tobytes()) for n, t in tensors.items()}
    assert load(folder).checksums() == expected


def test_checksums_when_one_element_changes_then_only_that_tensor_differs(folder: Path):
    before = load(folder).checksums()

    def bump(tensors: Tensors) -> Tensors:
        tensors[Q][3, 5] += 1e-3
        return tensors

    rewrite(folder, bump)
    after = load(folder).checksums()
    assert [name for name in before if before[name] != after[name]] == [Q]


def test_load_when_checkpoint_is_bfloat16_then_converted(folder: Path):
    rewrite(folder, lambda t: {name: tensor.bfloat16() for name, tensor in t.items()})
    weights = load(folder)
    assert weights.embed.dtype == torch.float32


def test_weights_when_they_are_unloaded_then_no_reference_keeps_their_memory(folder):
    config, weights = ModelConfig.from_folder(folder), load(folder)
    weights.checksums()
    model = Model(config, weights, 64)
    cache = KVCache(config, torch.float32, max_rows=2, max_length=64)
    runner = ModelRunner(model, cache, max_total_tokens=128, max_prefill_tokens=64, seed=0)
    kept = weakref.ref(weights.layers[0].qkv)
    del weights
    runner.unload()
    gc.collect()
    assert kept() is None
    assert model.weights.embed.numel() == 0
