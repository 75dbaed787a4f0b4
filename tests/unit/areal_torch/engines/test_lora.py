"""LoRA: adapters train, the model stays, and what leaves the trainer is merged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.unit.areal_torch.engines.hub_families import make_family
from tests.unit.areal_torch.engines.train_fixtures import gradients, make_batch, weighted_loss

from areal.config.training import LoraConfig, OptimizerConfig, TrainEngineConfig
from areal.errors import InvalidInput
from areal_torch.engines.fsdp import FSDPEngine
from areal_torch.engines.model import lora
from areal_torch.engines.model.source import load_model

RANK, ALPHA = 4, 12


def engine_of(path: Path, **keys: object) -> FSDPEngine:
    keys = {
        "lora": LoraConfig(rank=RANK, alpha=ALPHA),
        "optimizer": OptimizerConfig(lr=1e-2, warmup_steps_proportion=0.0),
        **keys,
    }
    engine = FSDPEngine(TrainEngineConfig(path=str(path), **keys))  # type: ignore[arg-type]
    engine.initialize()
    return engine


def trained(path: Path, **keys: object) -> FSDPEngine:
    engine = engine_of(path, **keys)
    for seed in range(3):
        engine.train_batch(make_batch(seed), weighted_loss)
    return engine


def load(path: Path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype="float32")


def test_training_when_adapters_learn_then_the_model_stays_and_only_they_have_state(
    model_dir: Path,
) -> None:
    engine = trained(model_dir)
    before = load(model_dir).state_dict()
    adapted = {name for name, _ in engine.model.named_parameters() if ".lora_" in name}
    linear = {name for name, m in load(model_dir).named_modules() if type(m) is torch.nn.Linear}
    assert len(adapted) == 2 * len(linear - {"lm_head"})
    for name, tensor in engine.model.hf.state_dict().items():
        if ".lora_" not in name:
            assert torch.equal(tensor, before[name.replace(".base_layer.", ".")]), name
        elif ".lora_B." in name:
            assert tensor.abs().max() > 0, name
    state = engine.step.optimizer.state
    of = {id(p): name for name, p in engine.model.named_parameters()}
    assert {of[id(p)] for p in state} == adapted
    found, _ = gradients(engine, make_batch(0))
    assert found.keys() == adapted
    engine.destroy()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks
def test_export_when_adapters_learned_then_it_is_what_peft_merges(
    model_dir: Path, tmp_path: Path
) -> None:
    from peft import PeftModel

    engine = trained(model_dir)
    batch = make_batch(7)
    ours = engine.forward(batch)
    engine.save(tmp_path / "merged")
    lora.write(engine.model.hf, tmp_path / "adapter", str(model_dir))
    assert torch.equal(engine.forward(batch), ours), "the model itself is not merged"
    sent = dict(engine.iter_full_tensors("bfloat16"))
    engine.destroy()
    expected = PeftModel.from_pretrained(load(model_dir), tmp_path / "adapter")
    expected = expected.merge_and_unload().state_dict()
    found = load(tmp_path / "merged").state_dict()
    assert found.keys() == expected.keys()
    changed = 0
    for name, tensor in expected.items():
        assert torch.allclose(found[name], tensor, rtol=1e-6, atol=1e-7), name
        changed += not torch.equal(tensor, load(model_dir).state_dict()[name])
    assert changed > 5
    assert sent.keys() <= found.keys()
    for name, tensor in sent.items():
        assert torch.equal(tensor, found[name].to(torch.bfloat16)), name
    merged = FSDPEngine(TrainEngineConfig(path=str(tmp_path / "merged"), optimizer=None))
    merged.initialize()
    assert torch.allclose(merged.forward(batch), ours, atol=1e-5)
    merged.destroy()


def test_reference_when_adapters_are_off_then_it_is_the_model_without_them(
    model_dir: Path,
) -> None:
    engine, batch = trained(model_dir), make_batch(7)
    plain = FSDPEngine(TrainEngineConfig(path=str(model_dir), optimizer=None))
    plain.initialize()
    with engine.without_adapters():
        assert torch.equal(engine.forward(batch), plain.forward(batch))
    assert not torch.allclose(engine.forward(batch), plain.forward(batch), atol=1e-2)
    before, _ = gradients(engine, batch)
    with engine.without_adapters():
        engine.forward(batch)
    after, _ = gradients(engine, batch)
    assert all(torch.equal(before[name], after[name]) for name in before)
    engine.destroy()
    plain.destroy()


def test_start_when_adapters_are_drawn_then_they_change_nothing_and_follow_the_seed(
    model_dir: Path,
) -> None:
    def drawn(seed: int) -> dict[str, torch.Tensor]:
        engine = engine_of(model_dir, seed=seed)
        plain = dict(engine.iter_full_tensors())
        found = {n: p.detach().clone() for n, p in lora.saved_parameters(engine.model)}
        engine.destroy()
        assert all(torch.equal(t, load(model_dir).state_dict()[n]) for n, t in plain.items())
        return found

    one, same, other = drawn(1), drawn(1), drawn(2)
    downs = [name for name in one if ".lora_A." in name]
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not any(torch.equal(one[name], other[name]) for name in downs)
    bound = 1 / one[downs[0]].shape[1] ** 0.5
    assert 0.8 * bound < float(one[downs[0]].abs().max()) <= bound  # as peft's, kaiming of sqrt(5)


@pytest.mark.parametrize("sharded", [False, True])
def test_resume_when_a_checkpoint_has_adapters_only_then_training_continues_bit_equal(
    model_dir: Path, tmp_path: Path, sharded: bool
) -> None:
    engine = trained(model_dir, fsdp_at_world_size_1=sharded)
    engine.save_checkpoint(tmp_path / "half").result(timeout=60)
    kept = engine.checkpoint_bytes()
    adapters = sum(p.nbytes for _, p in lora.saved_parameters(engine.model))
    assert kept < 3 * adapters + 20_000  # two moments, and the generators' states
    resumed = engine_of(model_dir, fsdp_at_world_size_1=sharded)
    resumed.load_checkpoint(tmp_path / "half")
    for each in (engine, resumed):
        each.train_batch(make_batch(5), weighted_loss)
    expected = dict(engine.iter_full_tensors())
    for name, tensor in resumed.iter_full_tensors():
        assert torch.equal(tensor, expected[name]), name
    engine.destroy()
    resumed.destroy()


def test_layers_when_recomputed_then_gradients_stay(model_dir: Path) -> None:
    kept = engine_of(model_dir, gradient_checkpointing=False)
    again = engine_of(model_dir, gradient_checkpointing=True)
    (one, _), (other, _) = (gradients(each, make_batch(0)) for each in (kept, again))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert any(tensor.abs().max() > 0 for tensor in one.values())
    kept.destroy()
    again.destroy()


def test_bfloat16_when_it_computes_then_the_model_is_stored_in_it_and_adapters_are_not(
    model_dir: Path,
) -> None:
    engine = trained(model_dir, dtype="bfloat16")
    kinds = {".lora_" in name: p.dtype for name, p in engine.model.named_parameters()}
    assert kinds == {True: torch.float32, False: torch.bfloat16}
    before = load(model_dir).state_dict()
    moved = 0.0
    for name, tensor in engine.iter_full_tensors("float32"):
        moved = max(moved, float((tensor - before[name]).abs().max()))
    assert moved > 1e-3
    engine.destroy()


def test_targets_when_named_then_those_alone_are_adapted(model_dir: Path) -> None:
    engine = engine_of(model_dir, lora=LoraConfig(targets=["q_proj", "v_proj"]))
    names = [n for n, _ in lora.saved_parameters(engine.model)]
    assert {name.split(".")[-4] for name in names} == {"q_proj", "v_proj"}
    engine.destroy()


@pytest.mark.parametrize(
    "targets", [["no_proj"], ["embed_tokens"], ["q_proj", "lm_head"], ["self_attn.q_proj"]]
)
def test_targets_when_not_linear_layers_of_the_model_then_they_are_refused(
    model_dir: Path, targets: list[str]
) -> None:
    wrong = rf"actor\.lora\.targets '{targets[-1]}': expected linear layers of Qwen2ForCausalLM"
    with pytest.raises(InvalidInput, match=f"{wrong}, not the head: down_proj, gate_proj, k_"):
        engine_of(model_dir, lora=LoraConfig(targets=targets))


def test_model_when_it_has_a_vision_tower_then_only_its_language_decoder_is_adapted(
    tmp_path: Path,
) -> None:
    folder = str(make_family("qwen2_5_vl", tmp_path))
    for targets in ([], ["gate_proj"]):  # both parts have a gate_proj
        hf = load_model(folder, torch.float32, from_scratch=False, seed=0)
        lora.inject(hf, LoraConfig(targets=targets), torch.float32)
        adapted = [name for name, _ in hf.named_parameters() if ".lora_" in name]
        assert adapted
        assert all(".language_model." in name for name in adapted), adapted
    hf = load_model(folder, torch.float32, from_scratch=False, seed=0)
    with pytest.raises(InvalidInput, match=r"actor\.lora\.targets 'qkv': expected .*: down_proj, "):
        lora.inject(hf, LoraConfig(targets=["qkv"]), torch.float32)


@pytest.mark.parametrize("train", ["d1t2", "d4e2", "d2t2c2e4"])
def test_layout_when_matrices_or_experts_are_spread_then_lora_is_accepted(train: str) -> None:
    from areal.config.experiment import GRPOConfig, build_config

    overrides = [f"allocation_mode=sglang:d1+fsdp:{train}", "actor.lora={}"]
    actor = build_config(GRPOConfig, None, overrides).actor
    assert (actor.lora, actor.layout) == (LoraConfig(), train)


def test_adapter_when_written_then_its_config_says_which_model(
    model_dir: Path, tmp_path: Path
) -> None:
    engine = engine_of(model_dir)
    lora.write(engine.model.hf, tmp_path, "org/base")
    engine.destroy()
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (RANK, ALPHA)
    assert config["base_model_name_or_path"] == "org/base"
