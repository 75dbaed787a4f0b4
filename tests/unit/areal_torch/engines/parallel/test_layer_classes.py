"""A model whose layers are not known would be gathered whole on each rank: it is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from areal.config.training import TrainEngineConfig
from areal.errors import InvalidInput
from areal_torch.engines.fsdp import FSDPEngine
from areal_torch.engines.model import source


@pytest.mark.parametrize(("classes", "named"), [({"NoSuchLayer"}, "NoSuchLayer"), (set(), "none")])
def test_initialize_when_no_layer_class_matches_then_refused_with_the_classes(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, classes: set[str], named: str
) -> None:
    build = source.build

    def without_layers(*arguments: Any, **options: Any) -> Any:
        hf = build(*arguments, **options)
        hf._no_split_modules = classes  # as of a model whose author named no layer, or another
        return hf

    monkeypatch.setattr(source, "build", without_layers)
    engine = FSDPEngine(TrainEngineConfig(path=str(model_dir)))
    try:
        with pytest.raises(
            InvalidInput,
            match=rf"model Qwen2ForCausalLM has none of the layer classes that it names "
            rf"\({named}\): each rank would gather the whole model",
        ):
            engine.initialize()
    finally:
        engine.destroy()
