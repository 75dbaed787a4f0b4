"""A model whose layers are not known would be gathered whole on each rank: it is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.distributed.fsdp import FSDPModule

from areal.config.training import TrainEngineConfig
from areal.errors import InvalidInput
from areal_torch.engines.fsdp import FSDPEngine
from areal_torch.engines.model import guards, source


def engine_of(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], None]
) -> FSDPEngine:
    build = source.build

    def changed(*arguments: Any, **options: Any) -> Any:
        hf = build(*arguments, **options)
        change(hf)
        return hf

    monkeypatch.setattr(source, "build", changed)
    return FSDPEngine(TrainEngineConfig(path=str(model_dir), fsdp_at_world_size_1=True))


def test_initialize_when_no_layer_class_matches_then_refused_with_the_classes(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(
        model_dir, monkeypatch, lambda hf: setattr(hf, "_no_split_modules", {"NoSuchLayer"})
    )
    try:
        with pytest.raises(
            InvalidInput,
            match=r"model Qwen2ForCausalLM has none of the layer classes that it names "
            r"\(NoSuchLayer\): each rank would gather the whole model",
        ):
            engine.initialize()
    finally:
        engine.destroy()


def test_initialize_when_a_model_names_no_layer_then_those_of_its_longest_list_are_sharded(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models: list[Any] = []

    def forget(hf: Any) -> None:
        models.append(hf)
        hf._no_split_modules = None

    engine = engine_of(model_dir, monkeypatch, forget)
    try:
        engine.initialize()
        layers = models[0].model.layers
        assert len(layers) > 1
        assert all(isinstance(each, FSDPModule) for each in layers)
    finally:
        engine.destroy()


def test_layers_when_a_model_names_none_then_a_longer_list_of_experts_inside_is_not_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(5))

    hf = nn.Module()
    hf.layers = nn.ModuleList(Layer() for _ in range(2))
    hf._no_split_modules = None
    monkeypatch.setattr(guards, "decoder_of", lambda hf: hf)
    assert guards.layer_classes(hf) == {"Layer"}
