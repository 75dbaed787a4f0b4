"""Checkpoints of several models: text is trained, the rest leaves the trainer as it came."""

import copy
import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.unit.areal_torch.engines.tiny_families import alone, saved, text_batch
from tests.unit.areal_torch.engines.train_fixtures import weighted_loss
from tools.gen_models import GRADIENT_TOLERANCE, LOGPROB_TOLERANCE, errors
from tools.tiny_architectures import COMPOSITE, tiny_model

from areal.config.training import LoraConfig, TrainEngineConfig
from areal.errors import InvalidInput
from areal_torch.engines.fsdp import FSDPEngine
from areal_torch.engines.model import guards
from areal_torch.engines.model.packed import PackedCausalLM

# Images of the three others train as well.
FAMILIES = sorted(COMPOSITE.keys() - {"qwen2_vl", "qwen2_5_vl", "qwen3_vl"})
pytestmark = [pytest.mark.process, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def initialize():
    engines = []

    def make(folder, **options):
        options = {"dtype": "float32", "gradient_checkpointing": "none", **options}
        engine = FSDPEngine(TrainEngineConfig(path=str(folder), **options))
        engines.append(engine)
        engine.initialize(total_train_steps=10)
        return engine

    yield make
    for engine in reversed(engines):
        engine.destroy()


@pytest.mark.parametrize("kind", FAMILIES)
def test_export_when_a_composite_was_trained_then_its_class_loads_it_with_equal_logits(
    tmp_path, initialize, kind
):
    hf = saved(kind, tmp_path / "source")
    engine = initialize(tmp_path / "source")
    batch = text_batch(hf)
    for _ in range(2):
        engine.train_batch(batch, weighted_loss)
    engine.save(tmp_path / "out")
    before, after = (load_all(tmp_path / name) for name in ("source", "out"))
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    towers = {name for name in before if not is_text(name)}
    assert towers
    assert not changed & towers
    assert changed
    again = type(hf).from_pretrained(tmp_path / "out", attn_implementation="eager")
    assert type(again) is type(hf)
    assert json.loads((tmp_path / "out/config.json").read_text())["architectures"] == [
        type(hf).__name__
    ]
    assert again.config.to_dict()["text_config"] == {
        **hf.config.to_dict()["text_config"],
        "dtype": again.config.to_dict()["text_config"]["dtype"],
    }
    torch.testing.assert_close(engine.forward(batch), alone(again.eval(), batch), atol=4e-5, rtol=0)


def load_all(folder):
    tensors = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


def is_text(name):
    return "language_model" in name or name.startswith("lm_head")


@pytest.mark.parametrize("kind", ["qwen3_5", "gemma3", "gemma4"])
def test_model_when_a_composite_is_built_then_towers_are_in_no_memory_and_no_optimizer(
    tmp_path, initialize, kind
):
    saved(kind, tmp_path)
    engine = initialize(tmp_path)
    names = [name for name, _ in engine.model.named_parameters()]
    assert names
    assert all(is_text(name.removeprefix("hf.")) for name in names)
    buffers = {name for name, _ in engine.model.named_buffers()}
    assert not [name for name in buffers if "vision" in name or "visual" in name]
    held = {id(p) for group in engine.step.optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in engine.model.parameters()}
    assert engine.checkpoint_bytes() > 0


def test_checkpoint_when_a_composite_resumes_then_continues_as_if_it_had_not_ended(
    tmp_path, initialize
):
    hf = saved("qwen3_5", tmp_path / "source")
    batch = text_batch(hf)
    engine = initialize(tmp_path / "source")
    engine.train_batch(batch, weighted_loss)
    engine.save_checkpoint(tmp_path / "checkpoint").result(timeout=60)
    engine.train_batch(batch, weighted_loss)
    again = initialize(tmp_path / "source")
    again.load_checkpoint(tmp_path / "checkpoint")
    again.train_batch(batch, weighted_loss)
    for (name, ours), (_, theirs) in zip(
        again.iter_full_tensors(), engine.iter_full_tensors(), strict=True
    ):
        assert torch.equal(ours, theirs), name


def test_load_when_a_tower_lacks_a_tensor_or_has_one_too_many_then_says_which(tmp_path, initialize):
    saved("qwen3_5", tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    tensors = load_file(file)
    name = next(name for name in tensors if not is_text(name))
    value = tensors.pop(name)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(InvalidInput, match=f"lacks tensor '{name}'"):
        initialize(tmp_path)
    save_file({**tensors, name: value, "model.visual.odd": value.clone()}, file, {"format": "pt"})
    with pytest.raises(InvalidInput, match=r"unknown tensor 'model\.visual\.odd'"):
        initialize(tmp_path)


def test_weights_when_a_composite_is_drawn_then_its_towers_are_written_too(tmp_path, initialize):
    hf = saved("qwen3_5", tmp_path / "source")
    for file in (tmp_path / "source").glob("*.safetensors"):
        file.unlink()
    engine = initialize(tmp_path / "source", init_from_scratch=True)
    engine.train_batch(text_batch(hf), weighted_loss)
    engine.save(tmp_path / "out")
    again = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "out")
    assert again.state_dict().keys() == hf.state_dict().keys()


def test_adapters_when_a_composite_has_them_then_the_merged_export_loads(tmp_path, initialize):
    hf = saved("qwen3_5", tmp_path / "source")
    engine = initialize(tmp_path / "source", lora=LoraConfig(rank=2))
    batch = text_batch(hf)
    engine.train_batch(batch, weighted_loss)
    engine.save(tmp_path / "out")
    again = type(hf).from_pretrained(tmp_path / "out", attn_implementation="eager")
    torch.testing.assert_close(engine.forward(batch), alone(again.eval(), batch), atol=4e-5, rtol=0)


@pytest.mark.parametrize("kind", FAMILIES)
def test_packed_when_a_composite_gets_text_then_equals_each_sequence_alone(kind):
    # In float64 the difference is a leak's: wild weights amplify the rounding of float32.
    hf = tiny_model(kind, 0).double()
    if hf._can_set_experts_implementation():
        hf.set_experts_implementation("eager")  # torch has no grouped product of float64
    trained = copy.deepcopy(hf)
    assert guards.drop_towers(trained)
    model = PackedCausalLM(trained, kernel="packed", chunk_elements=1 << 12)
    logprob, gradient = errors(hf, model, seed=3)
    assert logprob <= LOGPROB_TOLERANCE
    assert gradient <= GRADIENT_TOLERANCE
