"""`actor.kernels=liger`: refused in one line where it cannot be, else it changes no gradient.

liger-kernel needs Triton and a GPU. `make test-liger` installs both packages into a folder of its
own, and lets Triton's interpreter compute Liger's kernels on the CPU.
"""

from __future__ import annotations

import os
import shutil
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import pytest
import torch
from tests.unit.areal_torch.engines.hub_families import make_family
from tests.unit.areal_torch.engines.train_fixtures import (
    assert_gradients_close,
    gradients,
    make_batch,
)

from areal import memory_estimate as estimate
from areal.config.allocation import Layout
from areal.config.training import (
    Checkpointing,
    Kernels,
    LoraConfig,
    OptimizerConfig,
    TrainEngineConfig,
)
from areal.errors import InvalidInput
from areal.memory_estimate import GIB, ModelShape, Setting, trainer_rank
from areal_torch.engines.fsdp import FSDPEngine
from areal_torch.engines.model.source import load_model
from areal_torch.engines.parallel import memory
from areal_torch.engines.parallel.memory import use_kernels

GPU = torch.device("cuda")  # a name: nothing is computed on it
FOLDER = os.environ.get("AREAL_TEST_LIGER", "")


@pytest.fixture
def hf(model_dir: Path) -> Any:
    return load_model(str(model_dir), torch.float32, from_scratch=False, seed=0)


def test_engine_when_there_is_no_gpu_then_liger_is_refused_in_one_line(model_dir: Path) -> None:
    engine = FSDPEngine(TrainEngineConfig(path=str(model_dir), kernels="liger"))
    with pytest.raises(InvalidInput, match=r"^kernels=liger: .* need a GPU, but the device"):
        engine.initialize()
    engine.destroy()


def test_liger_when_it_is_not_installed_then_the_line_says_what_to_install(
    hf: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with pytest.raises(InvalidInput, match=r"pip install liger-kernel==0\.8\.5\), or kern"):
        use_kernels(hf, [], "liger", GPU)


def test_liger_when_it_does_not_know_the_architecture_then_the_line_names_it(
    hf: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    patches: Any = ModuleType("liger_kernel.transformers.monkey_patch")
    patches.MODEL_TYPE_TO_APPLY_LIGER_FN = {"llama": None}
    for name in ("liger_kernel", "liger_kernel.transformers", patches.__name__):
        monkeypatch.setitem(sys.modules, name, patches)
    with pytest.raises(InvalidInput, match=r"Liger has no kernels for model_type 'qwen2'; exp"):
        use_kernels(hf, [], "liger", GPU)


@pytest.mark.parametrize(
    ("kind", "installed", "device", "layout", "expected"),
    [
        ("qwen2", True, "cuda", "d2", "liger"),
        ("llama", True, "cuda", "d4c2", "liger"),
        ("qwen2", False, "cuda", "d2", "eager"),
        ("qwen2", True, "cpu", "d2", "eager"),
        ("qwen2", True, "cuda", "d2t2", "eager"),
        ("qwen3_moe", True, "cuda", "d2", "eager"),
    ],
)
def test_auto_when_it_chooses_kernels_then_takes_liger_only_where_it_is_known_to_be_right(
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    installed: bool,
    device: str,
    layout: str,
    expected: Kernels,
) -> None:
    monkeypatch.setattr(estimate, "find_spec", lambda name: installed)
    chosen = partial(
        estimate.layer_kernels, kind=kind, layout=Layout.parse(layout), gpu=device == "cuda"
    )
    assert chosen("auto") == expected
    for named in get_args(Kernels)[1:]:
        assert chosen(named) == named


def test_estimate_when_norms_and_gates_are_fused_then_it_is_what_an_h200_took(
    tmp_path: Path,
) -> None:
    root = Path(__file__).parents[5]
    shutil.copy(root / "tools/gpu/shapes/qwen2.5-1.5b.json", tmp_path / "config.json")
    shape, setting = ModelShape.read(tmp_path), Setting(Layout.parse("d1"), 16384, gpu=True)
    activations = {
        kernels: trainer_rank(
            TrainEngineConfig(path=str(tmp_path), kernels=kernels), shape, setting, "none"
        ).parts["activations"]
        for kernels in ("eager", "liger", "compile")
    }
    # The peaks of docs/gpu.md: 71.46, 58.46 and 58.55 GiB.
    for kernels, peak in (("liger", 58.46), ("compile", 58.55)):
        less = (activations["eager"] - activations[kernels]) / GIB
        assert abs(less - (71.46 - peak)) < 0.3


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Liger's kernels on the CPU. Triton's interpreter lacks three things that they use."""
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    import numpy as np
    import triton.language as tl
    from triton.language.extra import libdevice
    from triton.runtime import autotuner, interpreter

    # Without a GPU there is nothing to tune for: the first configuration is used.
    monkeypatch.setattr(autotuner.Autotuner, "_bench", lambda *_, **__: [0.0, 0.0, 0.0])
    monkeypatch.setattr(libdevice, "rsqrt", lambda x: tl.rsqrt(x))
    convert = interpreter._implicit_cvt

    def with_floats(value: Any) -> Any:
        if not isinstance(value, float):
            return convert(value)
        handle = interpreter.TensorHandle(np.array([value], np.float32), tl.float32)
        return tl.core.tensor(handle, tl.float32)

    monkeypatch.setattr(interpreter, "_implicit_cvt", with_floats)
    use_liger = memory._use_liger
    monkeypatch.setattr(memory, "_use_liger", lambda hf, _: use_liger(hf, GPU))


@pytest.mark.skipif(not FOLDER, reason="needs liger-kernel and triton: make test-liger")
@pytest.mark.parametrize(
    ("kind", "recompute", "rank"),
    [
        *((kind, "none", 0) for kind in ("qwen2", "llama", "qwen3", "qwen3_moe")),
        # What is kept must not have been changed in its place.
        *(
            (kind, mode, 0)
            for kind in ("qwen2", "llama", "qwen3")
            for mode in ("selective", "full")
        ),
        ("qwen2", "selective", 4),
    ],
)
def test_gradients_when_liger_computes_norms_and_gates_then_equal_the_eager_ones(
    tmp_path: Path, interpreted: None, kind: str, recompute: Checkpointing, rank: int
) -> None:
    folder = make_family(kind, tmp_path / kind, num_key_value_heads=4)
    batch = make_batch(groups=2, per_group=2, vocabulary=90, longest=6)

    def run(kernels: Kernels) -> tuple[dict[str, torch.Tensor], Any]:
        config = TrainEngineConfig(
            path=str(folder),
            optimizer=OptimizerConfig(lr=1e-3),
            kernels=kernels,
            gradient_checkpointing=recompute,
            lora=LoraConfig(rank=rank) if rank else None,
        )
        engine = FSDPEngine(config)
        engine.initialize()
        held, _ = gradients(engine, batch)
        model = engine.model.hf
        engine.destroy()
        return held, model

    expected, plain = run("eager")
    ours, patched = run("liger")
    assert_gradients_close(ours, expected, 1e-5)
    assert type(patched) is type(plain)
    head = [getattr(each.forward, "__func__", each.forward) for each in (patched, plain)]
    assert head[0] is head[1], "the head is ours: it returns entropies, too"
    for name, module in patched.named_modules():
        if name.endswith("norm") and ".lora_" not in name:
            assert "Liger" in module.forward.__qualname__, name
    layer = patched.model.layers[0]
    assert "iger" in layer.mlp.forward.__qualname__ or kind == "qwen3_moe"
