"""What leaves the trainer when versions are adapters: bytes, names, values, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from areal.config.training import LoraConfig, TrainEngineConfig
from areal.errors import InvalidInput
from areal.weights.adapters import check_against
from areal.weights.manifest import (
    ADAPTER_FILE,
    PolicyVersion,
    WeightTensor,
    build_manifest,
    from_json,
    read_manifest,
    to_json,
)
from areal.weights.publisher import NewVersion
from areal.weights.safetensors import HostTensor
from areal_torch.engines.fsdp import FSDPEngine
from areal_torch.engines.model import lora
from areal_torch.models.tiny import make_tiny_model
from areal_torch.publish.disk import DiskPublisher
from areal_torch.publish.fallback import FallbackPublisher


def _engine(model: Path, **config: Any) -> FSDPEngine:
    engine = FSDPEngine(TrainEngineConfig(path=str(model), lora=LoraConfig(**config)))
    engine.initialize()
    return engine


def _publish(
    engine: FSDPEngine, model: Path, root: Path, version: int, described: lora.Described
) -> PolicyVersion:
    found: list[PolicyVersion] = []

    def deliver(tensors: tuple[HostTensor, ...], _: Any) -> None:
        new = NewVersion(version, 1, tensors, model)
        new = replace(new, adapter=described.info(new.name, tensors))
        FallbackPublisher([DiskPublisher(root)]).publish(new, found.append)

    engine.export(None, deliver, adapters=True).result(60)
    return found[0]


def _spread(engine: FSDPEngine, seed: int) -> None:
    torch.manual_seed(seed)
    for name, parameter in lora.saved_parameters(engine.model):
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks
def test_adapters_when_published_then_peft_computes_what_the_trainer_does(tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = make_tiny_model(tmp_path / "model", hidden_size=32)
    base = build_manifest(model, 0, 0)
    engine = _engine(model, rank=4, alpha=12)
    described = lora.Described(LoraConfig(rank=4, alpha=12), base.digest)
    first = _publish(engine, model, tmp_path / "weights", 1, described)
    _spread(engine, 1)
    second = _publish(engine, model, tmp_path / "weights", 2, described)
    merged = dict(engine.iter_full_tensors())
    engine.destroy()

    check_against(second, base)
    assert read_manifest(Path(second.path)) == second == from_json(to_json(second))
    assert first.adapter is not None
    assert second.adapter is not None
    assert (first.adapter.size, first.adapter.before) == (0.0, ""), "B begins with zeros"
    largest = max(
        float(t.abs().max())
        for name, t in load_file(Path(second.path) / ADAPTER_FILE).items()
        if "lora_B" in name
    )
    assert second.adapter.size == second.adapter.change == pytest.approx(3 * largest)
    assert second.adapter.before == first.folder_name == first.adapter_name
    plain = AutoModelForCausalLM.from_pretrained(model, dtype="float32")
    adapted = PeftModel.from_pretrained(plain, second.path).merge_and_unload().state_dict()
    for name, tensor in merged.items():
        torch.testing.assert_close(adapted[name], tensor, rtol=0, atol=1e-6)


def test_adapters_when_one_percent_of_the_model_then_two_percent_of_its_bytes(
    tmp_path: Path,
) -> None:
    model = make_tiny_model(tmp_path / "model", hidden_size=256)
    whole = build_manifest(model, 0, 0)
    engine = _engine(model, rank=1, alpha=2)
    trained = sum(p.numel() for _, p in lora.saved_parameters(engine.model))
    share = trained / sum(p.numel() for p in engine.model.hf.parameters())
    described = lora.Described(LoraConfig(rank=1, alpha=2), whole.digest)
    version = _publish(engine, model, tmp_path / "weights", 1, described)
    engine.destroy()
    assert share < 0.012
    held = sum(file.stat().st_size for file in Path(version.path).iterdir())
    assert version.size_bytes <= 0.02 * whole.size_bytes, (version.size_bytes, whole.size_bytes)
    assert held <= 0.03 * whole.size_bytes, "with the manifest"


def _manifest(model: PolicyVersion, **changes: tuple[int, ...] | None) -> PolicyVersion:
    module = "model.layers.0.self_attn.q_proj"
    shape = next(t.shape for t in model.tensors if t.name == f"{module}.weight")
    shapes: dict[str, tuple[int, ...] | None] = {
        "lora_A.weight": (2, shape[1]),
        "lora_B.weight": (shape[0], 2),
    }
    shapes |= changes
    from areal.weights.manifest import AdapterInfo

    return PolicyVersion(
        3,
        1,
        "",
        tensors=tuple(
            WeightTensor(f"base_model.model.{module}.{name}" if name[0] == "l" else name, s, "F32")
            for name, s in shapes.items()
            if s is not None
        ),
        adapter=AdapterInfo(2, 4, model.digest),
    )


def test_adapter_when_it_does_not_fit_version_0_then_one_line_says_what(tmp_path: Path) -> None:
    base = build_manifest(make_tiny_model(tmp_path / "model", hidden_size=32), 0, 0)
    good = _manifest(base)
    check_against(good, base)
    assert good.adapter is not None
    wide = (32, 3)
    embedding = "model.embed_tokens.weight"
    for bad, said in (
        (_manifest(base, **{"lora_B.weight": None}), "expected both lora_A and lora_B"),
        (_manifest(base, **{"lora_B.weight": wide}), "expected rank 2 for a matrix"),
        (_manifest(base, **{"lora_A.weight": (2,)}), "expected a matrix"),
        (_manifest(base, **{embedding: (8, 32)}), "expected base_model.model.MODULE.lora_A"),
        (replace(good, adapter=replace(good.adapter, rank=3)), "expected rank 3"),
        (replace(good, adapter=replace(good.adapter, rank=0)), "expected 1 or more"),
        (replace(good, adapter=replace(good.adapter, base_digest="0" * 32)), "was changed since"),
        (replace(good, tensors=()), "no tensors"),
        (replace(good, files=base.files), "expected adapter_config.json and"),
    ):
        with pytest.raises(InvalidInput, match=said) as caught:
            check_against(bad, base)
        assert "\n" not in str(caught.value)
