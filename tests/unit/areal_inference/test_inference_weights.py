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

from areal.weights.safetensors import digest_of
from areal_inference.decode.runner import ModelRunner
from areal_inference.model.config import ModelConfig
from areal_inference.model.kv_cache import KVCache
from areal_inference.model.transformer import Model
from areal_inference.model.weights import WeightError, load_weights
from areal_torch.models.cpu_matmul import FLOAT32, Storage

Q = "model.layers.1.self_attn.q_proj.weight"
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_model(tmp_path)
    return tmp_path


def load(folder: Path, dtype: torch.dtype = torch.float32, storage: Storage | None = None):
    return load_weights(str(folder), ModelConfig.from_folder(folder), dtype, storage=storage)


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


BY_OUT, BY_IN = Storage(torch.bfloat16, transposed=True), Storage(torch.bfloat16)


@pytest.mark.parametrize("published", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("storage", [BY_OUT, BY_IN, FLOAT32], ids=str)
def test_weights_when_stored_in_any_way_then_what_leaves_them_is_the_bfloat16_checkpoint(
    folder: Path, storage: Storage, published: torch.dtype
):
    """Digests, copies for a delta and parts for a neighbor are over rounded values, never ours."""
    tensors = load_file(folder / "model.safetensors")
    expected = {
        name: tensor.bfloat16().view(torch.uint8).numpy().tobytes()
        for name, tensor in tensors.items()
    }
    rewrite(folder, lambda t: {name: tensor.to(published) for name, tensor in t.items()})

    weights = load(folder, torch.bfloat16, storage)

    assert weights.embed.dtype == storage.dtype
    assert weights.checksums() == {name: digest_of(data) for name, data in expected.items()}
    assert weights.digest() == load(folder, torch.bfloat16).digest()
    for name, data in expected.items():
        assert bytes(weights.copy_of(name)) == data
        assert weights.part_of(name, 3, 131) == data[3:131]
    assert sum(len(weights.copy_of(name)) for name in expected) == sum(map(len, expected.values()))


@pytest.mark.parametrize("storage", [BY_OUT, BY_IN, FLOAT32], ids=str)
def test_weights_when_a_set_is_filled_again_then_it_holds_the_update(
    tmp_path: Path, storage: Storage
):
    folders = tmp_path / "one", tmp_path / "two"
    for seed, folder in enumerate(folders):
        make_model(folder, seed=seed)
    config = ModelConfig.from_folder(folders[0])
    spare = load(folders[0], torch.bfloat16, storage)
    place = spare.layers[0].qkv.data_ptr()

    again = load_weights(str(folders[1]), config, torch.bfloat16, storage=storage, spare=spare)

    assert again.layers[0].qkv.data_ptr() == place
    assert again.checksums() == load(folders[1], torch.bfloat16).checksums()
    torch.testing.assert_close(again.head, again.embed.t(), rtol=0, atol=0)


@pytest.mark.parametrize("storage", [BY_OUT, BY_IN, FLOAT32], ids=str)
def test_weights_when_stored_in_any_way_then_a_contradicting_tied_head_is_refused(
    folder: Path, storage: Storage
):
    embed = "model.embed_tokens.weight"
    rewrite(folder, lambda t: t | {"lm_head.weight": t[embed].clone()})
    load(folder, torch.bfloat16, storage)

    rewrite(folder, lambda t: t | {"lm_head.weight": t[embed] * (1 + 2**-6)})
    with pytest.raises(WeightError, match="expected them tied"):
        load(folder, torch.bfloat16, storage)


def test_weights_when_by_rows_and_tied_then_head_and_embedding_are_one_matrix(folder: Path):
    weights = load(folder, torch.bfloat16, BY_OUT)
    assert weights.head.data_ptr() == weights.embed.data_ptr()
