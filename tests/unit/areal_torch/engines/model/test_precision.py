"""Tensors that stay in float32 do so in the forward pass, in a step and in what is published."""

import json

import pytest
import torch
from safetensors.torch import load_file
from tests.unit.areal_torch.engines.tiny_families import saved, text_batch
from tests.unit.areal_torch.engines.train_fixtures import weighted_loss
from tools.tiny_architectures import tiny_model

from areal.config.training import LoraConfig, OptimizerConfig, RefConfig, TrainEngineConfig
from areal.errors import ConfigError, InvalidInput
from areal.memory_estimate import ModelShape
from areal_torch.engines.fsdp import FSDPEngine
from areal_torch.engines.model.attention.trial import shapes_of
from areal_torch.engines.model.precision import float32_tensors
from areal_torch.engines.model.source import load_model
from areal_torch.engines.parallel import apply
from areal_torch.engines.parallel.apply import decoder_layers, unsharded

pytestmark = [pytest.mark.process, pytest.mark.filterwarnings("ignore")]
# Ends of names, of a parameter or a buffer in each family.
KEPT = {
    "qwen3_5": {"A_log", "dt_bias", "linear_attn.norm.weight"},
    "qwen3_5_moe": {"A_log", "dt_bias", "linear_attn.norm.weight"},
    "kimi_linear": {"A_log", "dt_bias", "o_norm.weight"},
    "bamba": {"A_log", "dt_bias"},
    "mamba": {"A_log"},
    "deepseek_v3": {"e_score_correction_bias"},
    "ernie4_5_moe": {"gate.weight", "e_score_correction_bias"},
    "llama": set(),
}


@pytest.fixture
def initialize():
    engines = []

    def make(config):
        engine = FSDPEngine(config)
        engines.append(engine)
        engine.initialize(total_train_steps=10)
        return engine

    yield make
    for engine in reversed(engines):
        engine.destroy()


def trainer(folder, **options):
    optimizer = OptimizerConfig(lr=1e-2, warmup_steps_proportion=0.0)
    options = {"dtype": "bfloat16", "optimizer": optimizer, **options}
    return TrainEngineConfig(path=str(folder), **options)


def seen_dtypes(engine, batch):
    """The dtype of each tensor while the module that has it computes."""
    found = {}

    def look(name, module):
        for own, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                full = f"{name}.{own}".replace(".base_layer.", ".")
                found[full.removeprefix("hf.")] = tensor.dtype

    handles = [
        module.register_forward_hook(lambda m, *_, name=name: look(name, m))
        for name, module in engine.model.named_modules()
    ]
    engine.forward(batch)
    for handle in handles:
        handle.remove()
    return found


def check(dtypes, kept):
    exact = {name for name, dtype in dtypes.items() if dtype == torch.float32}
    for end in kept:
        assert {name for name in exact if name.endswith(end)}, f"{end} in {sorted(dtypes)}"
    for name in dtypes:
        if name.endswith(("A_log", "dt_bias", "e_score_correction_bias")):
            assert name in exact
        if name.endswith(("q_proj.weight", "out_proj.weight", "embed_tokens.weight")):
            assert name not in exact


@pytest.mark.parametrize("kind", KEPT)
def test_tensors_when_a_model_trains_in_bfloat16_then_those_of_the_list_stay_exact(
    tmp_path, initialize, kind
):
    hf = saved(kind, tmp_path / "source", scale=0.3)
    engine = initialize(trainer(tmp_path / "source"))
    batch = text_batch(hf)
    check(seen_dtypes(engine, batch), KEPT[kind])
    names = float32_tensors(engine.model.hf)
    assert bool(names) == bool(KEPT[kind])
    before = {name: t.clone() for name, t in engine.iter_full_tensors()}
    engine.train_batch(batch, weighted_loss)
    after = dict(engine.iter_full_tensors())
    moved = {name for name in after if not torch.equal(before[name], after[name])}
    for end in KEPT[kind] - {"e_score_correction_bias"}:
        assert {name for name in moved if name.endswith(end)}, end


@pytest.mark.parametrize("kind", KEPT)
def test_weights_when_they_are_published_in_bfloat16_then_those_of_the_list_are_not_rounded(
    tmp_path, initialize, kind
):
    saved(kind, tmp_path / "source", scale=0.3)
    engine = initialize(trainer(tmp_path / "source"))
    whole = dict(engine.iter_full_tensors())
    engine.save(tmp_path / "out", dtype="bfloat16")
    (file,) = (tmp_path / "out").glob("*.safetensors")
    sent = load_file(file)
    check({name: tensor.dtype for name, tensor in sent.items() if is_text(name)}, KEPT[kind])
    for name, tensor in sent.items():
        if tensor.dtype == torch.float32:
            assert torch.equal(tensor, whole[name])
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "bfloat16"


def is_text(name):
    return "visual" not in name


@pytest.mark.parametrize("kind", ["qwen3_5", "ernie4_5_moe", "deepseek_v3"])
def test_tensors_when_weights_are_stored_in_bfloat16_then_those_of_the_list_are_exact_too(
    tmp_path, initialize, kind
):
    hf = saved(kind, tmp_path, scale=0.3)
    batch = text_batch(hf)
    adapted = initialize(trainer(tmp_path, lora=LoraConfig(rank=2)))
    check(seen_dtypes(adapted, batch), KEPT[kind])
    reference = initialize(RefConfig(path=str(tmp_path), dtype="bfloat16"))
    check(seen_dtypes(reference, batch), KEPT[kind])
    # As much as its own rounding: the reference is the model that the trainer starts from.
    again = initialize(trainer(tmp_path))
    assert torch.equal(reference.forward(batch), again.forward(batch))


def test_buffers_when_a_module_around_computes_them_then_they_are_not_empty(tmp_path):
    hf = saved("falcon_h1", tmp_path)
    loaded = load_model(str(tmp_path), torch.float32, from_scratch=False, seed=0)
    expected = dict(hf.named_buffers())
    for name, buffer in loaded.named_buffers():
        assert torch.equal(buffer, expected[name]), name


def test_buffers_when_nothing_computes_one_then_loading_says_which(tmp_path, monkeypatch):
    from transformers.models.falcon_h1 import modeling_falcon_h1 as modeling

    saved("falcon_h1", tmp_path)
    monkeypatch.setattr(
        modeling.FalconH1PreTrainedModel, "_init_weights", lambda self, module: None
    )
    with pytest.raises(InvalidInput, match=r"FalconH1ForCausalLM does not compute its buffer 'm"):
        load_model(str(tmp_path), torch.float32, from_scratch=False, seed=0)


def test_layers_when_classes_that_are_named_nest_then_the_outer_ones_are_gathered():
    layers = decoder_layers(tiny_model("mamba", 0))
    assert [type(layer).__name__ for layer in layers] == ["MambaBlock"] * 4


def test_shapes_when_layers_have_heads_of_two_sizes_then_both_are_tried():
    config = tiny_model("gemma4_text", 0).config
    assert {shape.width for shape in shapes_of(config)} == {8, 512}


def test_estimate_when_sizes_vary_or_a_model_is_of_several_then_reads_them(tmp_path):
    saved("gemma3n_text", tmp_path / "one")
    assert ModelShape.read(tmp_path / "one").intermediate == 48
    saved("mistral3", tmp_path / "two")
    assert ModelShape.read(tmp_path / "two").kind == "mistral3"


@pytest.mark.parametrize("kind", ["zamba", "zamba2"])
def test_model_when_layers_share_their_weights_then_is_refused(tmp_path, initialize, kind):
    saved(kind, tmp_path)
    for options in ({}, {"lora": LoraConfig(rank=2)}, {"dtype": "float32"}):
        with pytest.raises(InvalidInput, match="layers that share their weights"):
            initialize(trainer(tmp_path, **options))


def test_head_when_it_stays_in_float32_then_one_rank_trains_it_and_several_are_refused(
    tmp_path, initialize, monkeypatch
):
    """No group of FSDP has it, so its gradients would be those of one rank."""
    hf = saved("hy_v4", tmp_path)
    engine = initialize(trainer(tmp_path))
    assert list(unsharded(engine.model.hf)) == ["lm_head.weight"]
    before = engine.model.hf.lm_head.weight.detach().clone()
    engine.train_batch(text_batch(hf), weighted_loss)
    assert not torch.equal(engine.model.hf.lm_head.weight, before)
    monkeypatch.setattr(apply.dist, "get_world_size", lambda *_: 2)
    with pytest.raises(ConfigError, match=r"keeps lm_head.weight in float32, outside its decoder"):
        apply._check_unsharded(hf)
