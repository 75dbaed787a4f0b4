"""Who gets adapters and who gets merged weights, and what servers are started with."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.unit.areal_weight_sync.weight_sync_fakes import write_safetensors

from areal.config.experiment import GRPOConfig, build_config
from areal.errors import InvalidInput
from areal.weights.served_adapters import served_adapters
from areal_launch.clusters.base import Placement
from areal_launch.run_folder import RunFolder
from areal_launch.stack.plan import plan_stack

LAYER = "model.layers.0."
DENSE = {
    "model.embed_tokens.weight": (8, 4),
    f"{LAYER}self_attn.q_proj.weight": (4, 4),
    f"{LAYER}mlp.down_proj.weight": (4, 4),
    f"{LAYER}input_layernorm.weight": (4,),
}


def make(folder: Path, *overrides: str, tensors: dict[str, tuple[int, ...]] | None = None):
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "qwen2", "torch_dtype": "float32"}')
    arrays = {n: np.zeros(shape, "f4") for n, shape in (tensors or DENSE).items()}
    write_safetensors(model / "model.safetensors", arrays)
    values = [f"model.path={model}", f"run_root={folder / 'runs'}", *overrides]
    return build_config(GRPOConfig, None, values)


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        ((), "actor.lora is not set"),
        (("actor.lora.rank=8",), ""),
        (("actor.lora.rank=8", "weight_sync.transport=stream"), ""),
        (("actor.lora.publish=merged",), "is merged"),
        (("actor.lora.rank=8", "weight_sync.transport=distributed"), "broadcasts whole weights"),
        (("actor.lora.rank=8", "allocation_mode=sglang:d1|fsdp:d1@alternating"), "in turns"),
        (("actor.lora.rank=8", "endpoints.inference=[http://gpu:30000]"), "without --enable-lora"),
        (("actor.lora.publish=adapter", "endpoints.inference=[http://gpu:30000]"), ""),
        (("actor.lora.targets=[qkv_proj]",), "no adapters for layers named qkv_proj"),
    ],
)
def test_form_when_chosen_automatically_then_adapters_where_servers_can_add_them(
    tmp_path: Path, overrides: tuple[str, ...], why: str
) -> None:
    found, reason = served_adapters(make(tmp_path, *overrides))
    assert why in reason
    assert (found is None) == bool(why) == bool(reason)


@pytest.mark.parametrize(
    "foreign",
    [
        f"{LAYER}mlp.experts.0.up_proj.weight",
        f"{LAYER}self_attn.qkv_proj.weight",
        "model.language_model.layers.0.mlp.up_proj.weight",
        f"{LAYER}linear_attn.in_proj.weight",
        "visual.blocks.0.attn.proj.weight",
    ],
)
def test_form_when_the_model_has_layers_that_servers_may_not_adapt_then_merged_and_it_says_which(
    tmp_path: Path, foreign: str
) -> None:
    tensors = {**DENSE, foreign: (4, 4)}
    config = make(tmp_path, "actor.lora.rank=8", tensors=tensors)
    found, why = served_adapters(config)
    assert found is None
    assert foreign in why
    config.actor.lora.publish = "adapter"
    with pytest.raises(InvalidInput, match=r"actor\.lora\.publish 'adapter': .*expected 'merged'"):
        served_adapters(config)


def test_servers_when_adapters_are_published_then_started_for_their_rank_and_layers(
    tmp_path: Path,
) -> None:
    config = make(tmp_path, "actor.lora.rank=8", "allocation_mode=sglang:d2+fsdp:d1")
    plan = plan_stack(config, RunFolder(tmp_path / "a"), with_trainer=True)
    for spec in plan.inference:
        assert spec.argv[-1] == "--enable-lora"
        assert spec.argv[spec.argv.index("--max-lora-rank") + 1] == "8"
        assert "--lora-target-modules" not in spec.argv, "the CPU engine takes any"
    config.stack.inference_command = "python -m sglang.launch_server"
    config.actor.lora.targets = ["q_proj", "v_proj"]
    plan = plan_stack(config, RunFolder(tmp_path / "b"), with_trainer=True, placement=Placement())
    argv = plan.inference[0].argv
    at = argv.index("--enable-lora")
    assert argv[at:] == ("--enable-lora", "--lora-target-modules", "q_proj", "v_proj")
    assert argv[argv.index("--max-loras-per-batch") + 1] == "4"
    config.actor.lora.publish = "merged"
    plan = plan_stack(config, RunFolder(tmp_path / "c"), with_trainer=True)
    assert not [part for part in plan.inference[0].argv if "lora" in part]
