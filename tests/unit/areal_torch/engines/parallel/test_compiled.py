"""Which parts of a layer torch.compile computes, by counting the calls of its graphs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import Qwen2Config, Qwen2ForCausalLM

from areal.config.training import Checkpointing
from areal_torch.engines.parallel.apply import decoder_layers
from areal_torch.engines.parallel.memory import recompute_layers, use_kernels

LAYERS = 10  # more than torch compiles again for one function
CPU = torch.device("cpu")
SHORT = {("full", False), ("full", True)}


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def cases():
    """Every mode, plain and sharded; all but two are long, since each compiles."""
    return [
        pytest.param(*(mode, sharded), marks=[pytest.mark.long] * ((mode, sharded) not in SHORT))
        for mode in get_args(Checkpointing)
        for sharded in (False, True)
    ]


@pytest.mark.parametrize(("mode", "sharded"), cases())
@pytest.mark.usefixtures("group")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_layers_when_compiled_and_recomputed_then_graphs_compute_every_layer(
    mode, sharded, monkeypatch
):
    torch._dynamo.reset()
    called: Counter[int] = Counter()

    def counting(graph: torch.fx.GraphModule, _: Any) -> Any:
        mark = len(called)
        called[mark] = 0

        def run(*inputs: torch.Tensor) -> Any:
            called[mark] += 1
            return graph(*inputs)

        return run

    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function: compile_(function, backend=counting))
    config = Qwen2Config(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    hf = Qwen2ForCausalLM(config).eval()
    recompute_layers(hf, mode, "compile")
    use_kernels(hf, decoder_layers(hf), "compile", CPU)
    if sharded:  # which gives each layer a class of its own
        for layer in decoder_layers(hf):
            fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
    for tokens in (8, 11, 13):
        called.update(dict.fromkeys(called, 0))
        hf(input_ids=torch.arange(tokens)[None], use_cache=False).logits.sum().backward()
        # Before attention and after it, at least; a layer that is recomputed is computed twice.
        times = 1 if mode in ("none", "selective") else 2
        assert sum(called.values()) >= 2 * LAYERS * times
        # A graph is of all layers; recomputation may have graphs of its own.
        assert not [count for count in called.values() if count % LAYERS]
