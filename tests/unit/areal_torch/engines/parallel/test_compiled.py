"""Which parts of a layer torch.compile computes, by counting the calls of its graphs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, get_args

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


class Compiled(NamedTuple):
    """A model whose layers are compiled."""

    mode: Checkpointing
    hf: Any
    called: Counter[int]
    """Calls of each graph, by the order in which they were compiled."""


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def cases():
    """Every mode, plain and sharded; all but two are long, since each compiles."""
    return [
        pytest.param((mode, sharded), marks=[pytest.mark.long] * ((mode, sharded) not in SHORT))
        for mode in get_args(Checkpointing)
        for sharded in (False, True)
    ]


@pytest.fixture(params=cases(), ids=lambda case: f"{case[0]}-{case[1]}")
def compiled(
    request: pytest.FixtureRequest, group: None, monkeypatch: pytest.MonkeyPatch
) -> Compiled:
    """Layers in a mode, plain or sharded, and the calls of each of their graphs."""
    mode, sharded = request.param
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
    return Compiled(mode, hf, called)


def train(hf: Any, tokens: int) -> None:
    hf(input_ids=torch.arange(tokens)[None], use_cache=False).logits.sum().backward()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_layers_when_compiled_and_recomputed_then_graphs_compute_every_layer(
    compiled: Compiled,
) -> None:
    called, times = compiled.called, 1 if compiled.mode in ("none", "selective") else 2
    for tokens in (8, 11, 13):
        called.update(dict.fromkeys(called, 0))
        train(compiled.hf, tokens)
        # Before attention and after it, at least; a layer that is recomputed is computed twice.
        assert sum(called.values()) >= 2 * LAYERS * times
        # A graph is of all layers; recomputation may have graphs of its own.
        assert not [count for count in called.values() if count % LAYERS]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_layers_when_the_number_of_tokens_keeps_changing_then_all_is_compiled_by_the_second(
    compiled: Compiled,
) -> None:
    """Once for the first number, then for any; `offload` tries another graph in between."""
    train(compiled.hf, 8)
    first = len(compiled.called)
    train(compiled.hf, 11)
    both = len(compiled.called)
    assert first < both <= (3 if compiled.mode == "offload" else 2) * first
    for tokens in (13, 21, 34):
        train(compiled.hf, tokens)
    assert len(compiled.called) == both
