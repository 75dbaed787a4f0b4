"""Each rank reads its own part of a model, and all parts together are the model."""

import itertools
import json
import re

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tests.unit.areal_torch.engines.hub_families import make_family
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from areal.errors import InvalidInput
from areal_torch.engines.model import source
from areal_torch.engines.model.fill import own_box
from areal_torch.engines.model.tensor_directory import TensorDirectory

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Tensors of 0 to 4 dimensions."""
    path = tmp_path_factory.mktemp("tensors")
    shapes = [(), (7,), (5, 6), (4, 3, 5), (2, 3, 4, 5), (0, 3)]
    tensors = {
        f"{number}-{dtype}": torch.arange(int(np.prod(shape))).reshape(shape).to(dtype)
        for (number, shape), dtype in itertools.product(enumerate(shapes), DTYPES)
    }
    save_file(tensors, path / "model.safetensors")
    return path, tensors


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_read_when_asked_for_any_box_then_returns_that_part(folder, data):
    path, tensors = folder
    name = data.draw(st.sampled_from(sorted(tensors)))
    box = []
    for size in tensors[name].shape:
        ends = data.draw(st.lists(st.integers(0, size), min_size=2, max_size=2).map(sorted))
        box.append(slice(*ends))
    with TensorDirectory(path) as directory:
        found = directory.read(name, box)
        assert torch.equal(found, tensors[name][tuple(box)])
        assert found.dtype == tensors[name].dtype
        assert torch.equal(directory.read(name), tensors[name])


def test_read_when_the_file_was_cut_off_meanwhile_then_says_so(tmp_path):
    save_file({"a": torch.ones(1000)}, tmp_path / "model.safetensors")
    with TensorDirectory(tmp_path) as directory:
        (tmp_path / "model.safetensors").write_bytes(b"")
        with pytest.raises(InvalidInput, match="ends within tensor 'a'"):
            directory.read("a")


def boxes(shape, mesh_shape, placements):
    """Of every rank of a mesh."""
    found = []
    world = int(np.prod(mesh_shape))
    for rank in range(world):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
        try:
            names = ("a", "b", "c")[: len(mesh_shape)]
            mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
            tensor = DTensor.from_local(
                torch.empty(0, device="meta"), mesh, placements, run_check=False, shape=shape,
                stride=torch.empty(shape, device="meta").stride(),
            )  # fmt: skip
            found.append(own_box(tensor))
        finally:
            dist.destroy_process_group()
    return found


@pytest.mark.parametrize(
    ("shape", "mesh_shape", "placements", "copies"),
    [
        ((10, 4), (4,), [Shard(0)], 1),
        ((3, 4), (8,), [Shard(0)], 1),
        ((7, 9), (2, 2), [Shard(0), Shard(1)], 1),
        ((7, 9), (2, 3), [Replicate(), Shard(1)], 2),
        ((9, 5, 6), (2, 2, 2), [Replicate(), Shard(0), Shard(2)], 2),
        ((8,), (2, 2), [Shard(0), Shard(0)], 1),
    ],
)
def test_own_box_when_over_all_ranks_then_tiles_the_tensor(shape, mesh_shape, placements, copies):
    count = np.zeros(shape, dtype=int)
    for box in boxes(shape, mesh_shape, placements):
        count[box] += 1
    assert (count == copies).all()


def test_build_when_only_the_config_is_read_then_no_parameter_has_memory(tmp_path):
    make_family("qwen3_moe", tmp_path)
    hf = source.build(str(tmp_path), torch.float32)
    assert all(parameter.is_meta for parameter in hf.parameters())
    frequencies = hf.model.rotary_emb.inv_freq
    assert not frequencies.is_meta
    assert frequencies[0] == 1.0


@pytest.mark.parametrize("kind", ["qwen2", "qwen3_moe", "gemma3_text", "gpt_neox"])
def test_load_model_when_made_in_two_steps_then_is_what_from_pretrained_makes(tmp_path, kind):
    from transformers import AutoModelForCausalLM

    make_family(kind, tmp_path)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    hf = source.load_model(str(tmp_path), torch.float32, from_scratch=False, seed=0)
    ours = dict(hf.named_buffers()) | dict(hf.named_parameters())
    theirs = dict(expected.named_buffers()) | dict(expected.named_parameters())
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name
    assert hf.generation_config.to_dict() == expected.generation_config.to_dict()


def test_draw_when_the_seed_is_the_same_then_weights_are_and_look_like_transformers(tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    make_family("qwen3_moe", tmp_path)

    def drawn(seed):
        hf = source.load_model(str(tmp_path), torch.float32, from_scratch=True, seed=seed)
        return hf.state_dict()

    state = torch.get_rng_state()
    first, again, other = drawn(1), drawn(1), drawn(2)
    assert torch.equal(torch.get_rng_state(), state), "the caller's generator is left alone"
    assert all(torch.equal(first[name], again[name]) for name in first)
    config = AutoConfig.from_pretrained(tmp_path)
    usual = AutoModelForCausalLM.from_config(config, dtype=torch.float32).state_dict()
    assert first.keys() == usual.keys()
    for name, tensor in usual.items():
        if tensor.std() > 0:
            assert not torch.equal(first[name], other[name]), name
            assert first[name].std() == pytest.approx(float(tensor.std()), rel=0.4), name
        else:
            assert torch.equal(first[name], tensor), name


def changed(folder, file="config.json", **values):
    """Changes a JSON file of a model's folder."""
    path = folder / file
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def refused(folder):
    with pytest.raises(InvalidInput) as caught:
        source.load_model(str(folder), torch.float32, from_scratch=False, seed=0)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300 + len(str(folder))
    return str(caught.value)


@pytest.mark.parametrize(
    "values",
    [
        {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}},
        {"model_type": "bert-generation-decoder", "auto_map": {"AutoConfig": "own.OwnConfig"}},
    ],
)
def test_build_when_a_folder_brings_code_then_it_is_refused_without_a_question(
    tmp_path, monkeypatch, values
):
    def asked(*_):
        raise AssertionError("a question on a terminal would wait for an answer")

    monkeypatch.setattr("builtins.input", asked)
    make_family("qwen2", tmp_path)
    changed(tmp_path, **values)
    said = refused(tmp_path)
    assert "auto_map: code of its own is not run; expected a model_type that" in said
    assert "trust_remote_code" not in said


@pytest.mark.parametrize("part", [{}, {"text_config": {"hidden_size": 32}}])
def test_build_when_weights_are_quantized_then_the_method_is_named(tmp_path, part):
    make_family("qwen2", tmp_path)
    changed(tmp_path, quantization_config={"quant_method": "awq", "bits": 4}, **part)
    said = refused(tmp_path)
    assert "config.json': quantization_config: quant_method 'awq'" in said
    assert "expected a bfloat16 copy" in said


@pytest.mark.parametrize(("dtype", "named"), [(torch.float8_e4m3fn, "F8_E4M3"), (torch.int8, "I8")])
def test_load_model_when_a_weight_has_8_bits_then_its_dtype_is_named(tmp_path, dtype, named):
    make_family("qwen2", tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    name = "model.layers.0.mlp.up_proj.weight"
    weights[name] = weights[name].to(dtype)
    if dtype.is_floating_point:  # scales are unknown tensors, but not what is wrong
        weights["model.layers.0.mlp.up_proj.weight_scale_inv"] = torch.ones(1)
    save_file(weights, file, {"format": "pt"})
    assert f"tensor {name!r} has dtype {named}; expected one of F64, F32, F16, BF16" in refused(
        tmp_path
    )


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"dtype": "auto"}, "AttributeError, .*auto"),
        ({"hidden_size": "32"}, "hidden_size.* expected int"),
        ({"layer_types": ["full_attention"] * 7}, "layer_types"),
        ({"rope_parameters": {"rope_type": "su", "rope_theta": 1e4}}, "KeyError, 'su'"),
        ({"vocab_size": 1, "pad_token_id": 5}, "AssertionError, Padding_idx"),
        ({"num_attention_heads": 0, "head_dim": None}, "ZeroDivisionError"),
    ],
)
def test_build_when_transformers_raises_anything_then_one_line_names_the_file(
    tmp_path, values, said
):
    make_family("qwen2", tmp_path)
    changed(tmp_path, **values)
    assert re.search(rf"config\.json': transformers cannot load it: .*{said}", refused(tmp_path))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not a valid JSON file"),
        ("[]", "TypeError, 'list' object is not a mapping"),
        ('{"cache_implementation": "nope"}', r"ValueError, .*cache_implementation"),
    ],
)
def test_load_model_when_generation_defaults_are_broken_then_the_file_is_named(
    tmp_path, text, said
):
    make_family("qwen2", tmp_path)
    (tmp_path / "generation_config.json").write_text(text)
    expected = rf"generation_config\.json': transformers cannot read it: .*{said}"
    assert re.search(expected, refused(tmp_path))
