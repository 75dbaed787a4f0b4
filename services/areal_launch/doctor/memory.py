"""How much memory a run will need, from config.json and the experiment file; nothing is started.

Against the peak resident memory of a train step of small models on a CPU it was 0.9 to 1.2 times
what was measured (a test holds it to 0.75 to 1.35); on GPUs it is arithmetic.

What is counted, for P parameters in c bytes of compute precision, on W trainer ranks:

| part        | bytes                                                                              |
|-------------|------------------------------------------------------------------------------------|
| states      | 16 P / W: float32 master weights, gradients, two moments of AdamW                  |
| gathered    | FSDP's whole layers: 3 c of weights, c + 4 of gradients; the embedding and head    |
| activations | of the tokens of a micro-batch; with recomputation one layer's, and each's input   |
| logits      | 20 per element of a chunk: logits, log_softmax, entropy, their gradient            |
| reference   | c P / W and a gathered layer; 0 P where it is offloaded                            |
| weights     | of a server, over its GPUs; its KV cache is 2 layers kv_heads head_dim per token   |
"""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from areal.config.allocation import Layout, parse_allocation
from areal.config.experiment import BaseExperimentConfig, GRPOConfig
from areal.config.training import EngineConfig, TrainEngineConfig
from areal.errors import InvalidInput
from areal.models.directory import read_model_config, serving_dtype
from areal.weights.safetensors import SUFFIX, read_layout

GIB = 1024**3
_BYTES = {"float32": 4, "bfloat16": 2, "float64": 8}
_MASTER = 4
_LOGIT_BYTES = 20
# What a process takes before it has a tensor: python with torch and transformers (measured); a
# CUDA context with NCCL's buffers.
_PROCESS, _CUDA = int(0.4 * GIB), int(1.5 * GIB)
_DRIVER_TIMEOUT_S = 20.0
_CPU_CACHE = 1 * GIB
"""Most of the CPU engine's KV cache."""


@dataclass(frozen=True)
class ModelShape:
    """A decoder's sizes."""

    parameters: int
    layer_parameters: int
    """Of one layer."""
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    """Of the feed-forward layer that one token passes: of all its experts together."""
    vocabulary: int

    @property
    def root_parameters(self) -> int:
        """Outside the layers: embedding, head, last norm."""
        return self.parameters - self.layers * self.layer_parameters

    @classmethod
    def read(cls, directory: Path) -> ModelShape:
        """From config.json, and the headers of *.safetensors where they are there.

        Raises:
            InvalidInput: No config.json, or one that lacks a decoder's sizes.
        """
        config = read_model_config(directory)
        try:
            return cls._of(config, directory)
        except KeyError as error:
            raise InvalidInput(
                f"{str(directory / 'config.json')!r}: no {error.args[0]}: not a decoder whose "
                "memory can be estimated"
            ) from None

    @classmethod
    def _of(cls, config: dict[str, Any], directory: Path) -> ModelShape:
        hidden, layers, heads = (
            int(config[key]) for key in ("hidden_size", "num_hidden_layers", "num_attention_heads")
        )
        kv_heads = int(config.get("num_key_value_heads") or heads)
        head_dim = int(config.get("head_dim") or hidden // heads)
        vocabulary, dense = int(config["vocab_size"]), int(config["intermediate_size"])
        experts = int(
            next((config[k] for k in ("num_experts", "num_local_experts", "n_routed_experts")
                  if config.get(k)), 0)
        )  # fmt: skip
        attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
        if config.get("attention_bias") or str(config.get("model_type")).startswith("qwen2"):
            attention += head_dim * (heads + 2 * kv_heads)
        used, feed_forward = dense, 3 * hidden * dense
        if experts:
            size = int(config.get("moe_intermediate_size") or dense)
            shared = int(config.get("shared_expert_intermediate_size") or 0)
            used = size * int(config.get("num_experts_per_tok") or 2) + shared
            feed_forward = hidden * (3 * (experts * size + shared) + experts)
        layer = attention + feed_forward + 2 * hidden
        tied = bool(config.get("tie_word_embeddings"))
        parameters = layers * layer + hidden * (vocabulary * (1 if tied else 2) + 1)
        if stored := _stored_parameters(directory):
            layer, parameters = layer + (stored - parameters) // layers, stored
        return cls(
            parameters, layer, layers, hidden, heads, kv_heads, head_dim, used, vocabulary
        )  # fmt: skip


def _stored_parameters(directory: Path) -> int:
    """Elements of all tensors of the directory; 0 if there are none."""
    total = 0
    for file in directory.glob(f"*{SUFFIX}"):
        for place in read_layout(file).places:
            size = 1
            for dimension in place.shape:
                size *= dimension
            total += size
    return total


@dataclass(frozen=True)
class Need:
    """Bytes by part."""

    parts: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    def __str__(self) -> str:
        """`7.1 GiB (states 4.0, activations 3.1)`."""
        shown = ", ".join(
            f"{name} {size / GIB:.1f}" for name, size in self.parts.items() if size >= 0.05 * GIB
        )
        return f"{self.total / GIB:.1f} GiB" + (f" ({shown})" if shown else "")


def activation_bytes(shape: ModelShape, element: int, *, recompute: bool) -> int:
    """Bytes per token that a forward pass keeps for the backward pass.

    Args:
        shape: Of the model.
        element: Bytes of the compute precision.
        recompute: Each layer keeps its input only; one at a time is computed again.
    """
    # transformers' modules: per norm the float32 input, the normalized one and the output; queries,
    # keys, values before and after they are gathered by length; gate, up, their product, silu.
    upcast = 4 if element < 4 else 0
    norms = 2 * shape.hidden * (2 * element + upcast)
    attention = (3 * shape.heads + 4 * shape.kv_heads) * shape.head_dim * element
    layer = norms + attention + 4 * shape.intermediate * element
    if recompute:
        return shape.layers * shape.hidden * element + layer
    return shape.layers * layer


def micro_batch_tokens(config: GRPOConfig, engine: EngineConfig) -> int:
    """Most tokens of one micro-batch of a share."""
    longest = config.model.context_length
    shares = parse_allocation(config.allocation_mode).layout.data
    sequences = -(-config.train_dataset.batch_size // shares) * config.gconfig.n_samples
    return min(max(engine.mb_spec.max_tokens_per_mb, longest), sequences * longest)


def trainer_rank(config: GRPOConfig, shape: ModelShape, *, gpu: bool) -> Need:
    """What one trainer rank needs at its peak, on its device."""
    actor = config.actor
    layout = parse_allocation(config.allocation_mode).layout
    ranks = layout.per_copy
    parts = {
        "states": 4 * _MASTER * shape.parameters // ranks,
        **_step(actor, shape, micro_batch_tokens(config, actor), layout, gpu=gpu),
    }
    if config.ref is not None:
        element = _BYTES[_compute(actor, gpu=gpu)]
        stays = 0 if config.ref.offload and gpu else shape.parameters
        parts["reference"] = element * (stays // ranks + shape.layer_parameters * (ranks > 1))
    parts["process"] = _CUDA if gpu else _PROCESS
    return Need(parts)


def _compute(engine: EngineConfig, *, gpu: bool) -> str:
    return engine.dtype if engine.dtype != "auto" else ("bfloat16" if gpu else "float32")


def _step(
    engine: TrainEngineConfig, shape: ModelShape, tokens: int, layout: Layout, *, gpu: bool
) -> dict[str, int]:
    """What a train step adds to the states.

    Ranks that share tokens have their part of them; those that share matrices a part of each layer,
    but every activation: that is an upper bound.
    """
    element = _BYTES[_compute(engine, gpu=gpu)]
    recompute = gpu if engine.gradient_checkpointing is None else engine.gradient_checkpointing
    whole = layout.ranks > 1 or element < _MASTER or engine.fsdp_at_world_size_1
    layer, root = shape.layer_parameters // layout.tensor, shape.root_parameters
    tokens = -(-tokens // layout.context)
    gathered = layer * (4 * element + _MASTER) + root * (2 * element + _MASTER)
    logits = min(engine.logits_chunk_elements, tokens * shape.vocabulary)
    return {
        "gathered": gathered if whole else 0,
        "activations": tokens * activation_bytes(shape, element, recompute=recompute),
        "logits": _LOGIT_BYTES * logits,
    }


def server(config: BaseExperimentConfig, shape: ModelShape, *, gpu: bool) -> Need:
    """What one inference server needs on each of its GPUs, or on CPUs in all.

    Its cache holds every request that may run at once at full length; a GPU server that has less
    room lets requests wait. The CPU engine's cache ends at 1 GiB.
    """
    width = parse_allocation(config.allocation_mode).inference_gpus if gpu else 1
    element = _BYTES[serving_dtype(config.model.dtype, Path(config.model.path), gpu=gpu)]
    cache = config.stack.inference_max_running * config.model.context_length
    cache *= cache_bytes(shape, element)
    return Need(
        {
            "weights": element * shape.parameters // width,
            "cache": cache // width if gpu else min(cache, _CPU_CACHE),
            "process": _CUDA if gpu else _PROCESS,
        }
    )


def cache_bytes(shape: ModelShape, element: int) -> int:
    """Of one token's keys and values."""
    return 2 * shape.layers * shape.kv_heads * shape.head_dim * element


def gpu_bytes() -> int:
    """Free memory of this machine's GPU that has least of it; 0 without a driver that answers."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return 0
    query = [program, "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(  # noqa: S603 - what PATH has under that name
            query, capture_output=True, text=True, timeout=_DRIVER_TIMEOUT_S, check=True
        ).stdout
        return min((int(line) << 20 for line in answer.splitlines()), default=0)
    except (OSError, ValueError, subprocess.SubprocessError):
        return 0


def host(config: BaseExperimentConfig, shape: ModelShape, *, ranks: int) -> Need:
    """What a node's own memory has to hold while `ranks` trainer ranks with GPUs start and publish.

    Each rank builds the whole model in its master precision before it is sharded; rank 0 holds a
    published version.
    """
    element = _BYTES[serving_dtype(config.model.dtype, Path(config.model.path), gpu=True)]
    return Need(
        {
            "loading": _MASTER * shape.parameters * ranks,
            "publishing": element * shape.parameters,
            "processes": _PROCESS * ranks,
        }
    )
