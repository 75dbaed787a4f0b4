"""Estimates a trainer rank's peak memory from config.json and settings, without torch.

`areal doctor`, the trainer's log at start, the choice of what to recompute, and the message of an
out-of-memory error all use it.

What is counted, for P parameters in c bytes of compute precision, on W trainer ranks:

| part        | bytes                                                                              |
|-------------|------------------------------------------------------------------------------------|
| states      | 16 P / W: float32 master weights, gradients, two moments of AdamW (12 P / W if     |
|             | these are bfloat16); 0 if offloaded; with adapters c P / W, and 16 of each of      |
|             | theirs                                                                             |
| gathered    | FSDP's whole layers, embedding and head, c each, and gradients that are not yet    |
|             | sharded, c + 4 each                                                                |
| activations | of the tokens of a micro-batch: what layers keep, and one layer in full            |
| logits      | 20 per element of a chunk: logits, log_softmax, kept probabilities, their gradient |
| reference   | c P / W and a gathered layer; 0 P where it is offloaded                            |
| critic      | as the states: a model of the same sizes, trained after the actor or before it     |

The peak is where the backward pass begins (all activations, logits) or where it ends (a layer's
whole gradients), whichever is larger. Gradients of earlier micro-batches are there at both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from areal.config.allocation import Layout
from areal.config.training import (
    Checkpointing,
    Kernels,
    PPOActorConfig,
    RefConfig,
    TrainEngineConfig,
)
from areal.errors import InvalidInput
from areal.model_directory import read_config, read_model_config
from areal.weights.safetensors import SUFFIX, read_layout

GIB = 1024**3
BYTES = {"float32": 4, "bfloat16": 2, "float64": 8}
MASTER = 4
HEAD_TOKENS = 4096
"""Tokens whose logits a GPU computes at once, if they fit: fewer read the head's weight again."""
LEAST_CHUNK = 1 << 26
"""Elements of a logits tensor that there is always room for: 256 MiB in float32."""
LOGIT_BYTES = 20
# What a process takes before it has a tensor: python with torch and transformers (measured); a
# CUDA context with NCCL's buffers.
PROCESS, CUDA = int(0.4 * GIB), int(1.5 * GIB)
MODES: tuple[Checkpointing, ...] = ("none", "selective", "full", "offload")
"""What layers may keep for the backward pass, the fastest first."""
# What `auto` takes Liger for: it trained 1.2 times as fast on an H200 (docs/gpu.md), or is patched
# by the same code; `make test-liger` compares gradients.
_FUSED = frozenset({"llama", "qwen2", "qwen3"})
SURELY = 0.8
"""Share of the existing memory that can be used: the allocator's fragmentation takes the rest."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder, from its config.json."""

    parameters: int
    layer_parameters: int
    """Parameters of one layer."""
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    """Width of the feed-forward layer that one token passes; the sum over all its experts."""
    vocabulary: int
    routed: int = 0
    """Experts that one token passes; 0: there are none."""
    expert_parameters: int = 0
    """Parameters of the experts of one layer."""
    head_norms: bool = False
    """Whether queries and keys are normalized."""
    tied: bool = False
    """Whether the head is the embedding."""
    kind: str = ""
    """`model_type` of the checkpoint, also if it is made of several models."""
    recurrent: int = 0
    """Values per token that a recurrent layer projects its input to; 0: the model has none."""

    @property
    def root_parameters(self) -> int:
        """Number of parameters outside the layers: embedding, head, last norm."""
        return self.parameters - self.layers * self.layer_parameters

    @classmethod
    def read(cls, directory: Path) -> ModelShape:
        """Reads the sizes from config.json, and from the headers of *.safetensors if there are any.

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
        # Some models have a size for each layer.
        wide = config["intermediate_size"]
        dense = max(map(int, wide)) if isinstance(wide, list) else int(wide)
        vocabulary = int(config["vocab_size"])
        experts = int(
            next((config[k] for k in ("num_experts", "num_local_experts", "n_routed_experts")
                  if config.get(k)), 0)
        )  # fmt: skip
        attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
        if config.get("attention_bias") or str(config.get("model_type")).startswith("qwen2"):
            attention += head_dim * (heads + 2 * kv_heads)
        used, feed_forward, routed, of_experts = dense, 3 * hidden * dense, 0, 0
        if experts:
            size = int(config.get("moe_intermediate_size") or dense)
            shared = int(config.get("shared_expert_intermediate_size") or 0)
            routed = int(config.get("num_experts_per_tok") or 2)
            if config.get("model_type") == "llama4_text":
                # Each expert computes every token there, and the choice scales what it gets.
                routed, shared = experts, dense
            used, of_experts = size * routed + shared, 3 * hidden * experts * size
            feed_forward = of_experts + hidden * (3 * shared + experts)
        layer = attention + feed_forward + 2 * hidden
        tied = bool(config.get("tie_word_embeddings"))
        parameters = layers * layer + hidden * (vocabulary * (1 if tied else 2) + 1)
        if stored := _stored_parameters(directory):
            layer, parameters = layer + (stored - parameters) // layers, stored
        return cls(
            parameters=parameters,
            layer_parameters=layer,
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate=used,
            vocabulary=vocabulary,
            routed=routed,
            expert_parameters=of_experts,
            head_norms=str(config.get("model_type")).startswith("qwen3"),
            tied=tied,
            kind=str(read_config(directory).get("model_type")),
            recurrent=_recurrent_width(config),
        )


def _recurrent_width(config: dict[str, Any]) -> int:
    def number(*names: str) -> int:
        return int(next((config[name] for name in names if config.get(name)), 0))

    hidden = number("hidden_size")
    values = number("linear_num_value_heads") * number("linear_value_head_dim")
    keys = number("linear_num_key_heads") * number("linear_key_head_dim")
    if values:  # queries, keys, values and a gate
        return 2 * keys + 2 * values
    if width := number("linear_num_heads") * number("linear_head_dim"):
        return 4 * width
    inner = number("mamba_d_ssm") or number("mamba_num_heads") * number("mamba_head_dim")
    inner = inner or int(hidden * float(config.get("mamba_expand") or config.get("expand") or 0))
    if inner:  # a gate and the convolution's input
        groups = number("mamba_n_groups", "mamba_ngroups", "n_groups") or 1
        return 2 * inner + 2 * groups * number("mamba_d_state", "ssm_state_size", "state_size")
    return 3 * hidden if number("conv_L_cache") else 0


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
    """Estimated memory of a rank: bytes by part."""

    parts: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def largest(self) -> str:
        """Names the largest part."""
        return max(self.parts, key=lambda part: self.parts[part])

    def __str__(self) -> str:
        """`7.1 GiB (states 4.0, activations 3.1)`."""
        shown = ", ".join(
            f"{name} {size / GIB:.1f}" for name, size in self.parts.items() if size >= 0.05 * GIB
        )
        return f"{self.total / GIB:.1f} GiB" + (f" ({shown})" if shown else "")


@dataclass(frozen=True)
class Setting:
    """The settings that, besides the model, decide how much memory a rank needs."""

    layout: Layout
    tokens: int
    """Tokens of a micro-batch."""
    gpu: bool


def layer_kernels(wanted: Kernels, kind: str, layout: Layout, *, gpu: bool) -> Kernels:
    """Returns what `auto` stands for, the same on every rank of one installation.

    Args:
        wanted: As configured.
        kind: The model's `model_type`.
        layout: Of the trainer's ranks.
        gpu: Layers compute on GPUs.
    """
    if wanted != "auto":
        return wanted
    fits = gpu and layout.tensor == 1 and kind in _FUSED
    there = all(find_spec(package) for package in ("liger_kernel", "triton"))
    return "liger" if fits and there else "eager"


def activation_bytes(
    shape: ModelShape, element: int, mode: Checkpointing, *, fused: bool = False
) -> tuple[int, int]:
    """Returns bytes per token that each layer keeps, and that one recomputed layer needs.

    Args:
        shape: The model's sizes.
        element: bytes of the compute precision.
        mode: What layers keep; if less than everything, one layer at a time is recomputed.
        fused: Norms and gates are one kernel each, by Liger or torch.compile.
    """
    # transformers' modules: per norm the float32 input, the normalized one and the output; queries,
    # keys, values before and after they are gathered by length; gate, up, their product, silu.
    # A fused norm keeps its input and its output; a fused gate no silu.
    upcast = 4 if element < 4 and not fused else 0
    gates = 3 if fused else 4
    hidden, heads, kv = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    norms = 2 * hidden * (2 * element + upcast)
    if shape.head_norms:
        norms += (heads + kv) * (2 * element + upcast)
    # A token's experts each get a copy of it and return one.
    experts = 3 * shape.routed * hidden * element
    # Projected, convolved and gated, and once more in float32, in which states are computed. Layers
    # have this or attention; an upper bound has both.
    recurrent = shape.recurrent * (3 * element + 4)
    layer = (
        norms + (3 * heads + 4 * kv + gates * shape.intermediate) * element + experts + recurrent
    )
    if mode == "none":
        return layer, 0
    kept = hidden * element
    if mode == "selective":  # what q, k, v, attention, o, gate, up and down return
        kept += (2 * heads + 2 * kv + 2 * hidden + 2 * shape.intermediate) * element
        kept += (shape.routed * hidden + shape.recurrent) * element
    return 0 if mode == "offload" else kept, layer


def trainer_rank(
    engine: TrainEngineConfig,
    shape: ModelShape,
    setting: Setting,
    mode: Checkpointing,
    reference: RefConfig | None = None,
    chunk: int = 0,
) -> Need:
    """Returns the memory that one trainer rank needs at its peak, on its device.

    Ranks that share tokens each hold a part of the activations. Ranks that share matrices hold a
    part of each layer, but are counted with all activations, which is an upper bound.

    Args:
        engine: The trained model's settings.
        shape: Its sizes.
        setting: Ranks and tokens.
        mode: From `choose`.
        reference: A frozen model of the same sizes.
        chunk: Elements of the largest logits tensor; 0: the least.
    """
    layout, gpu = setting.layout, setting.gpu
    ranks, element = layout.per_copy, BYTES[compute_dtype(engine, gpu=gpu)]
    sharded = layout.ranks > 1 or element < MASTER or engine.fsdp_at_world_size_1
    # Experts that stay where they are, are gathered over those ranks only that hold the same ones.
    dense = shape.layer_parameters - shape.expert_parameters
    layer = dense // layout.tensor + shape.expert_parameters // max(layout.experts, 1)
    root = shape.root_parameters
    tokens = -(-setting.tokens // layout.context)
    chunk = engine.logits_chunk_elements or chunk or LEAST_CHUNK
    logits = min(chunk, tokens * shape.vocabulary)
    fused = layer_kernels(engine.kernels, shape.kind, layout, gpu=gpu) != "eager"
    kept, computed = (n * tokens for n in activation_bytes(shape, element, mode, fused=fused))
    states = 0 if engine.offload and gpu else _state_bytes(engine, shape, element, layout) // ranks
    head, trained = shape.root_parameters // (1 if shape.tied else 2), engine.lora is None
    # When the backward pass begins: all activations, two layers, the head's gradient in float32.
    # When it ends: one layer's activations, its gradient in both precisions, a second layer.
    begins = {
        "states": states,
        "gathered": sharded * element * (2 * layer + root) + trained * MASTER * head,
        "activations": shape.layers * kept + computed,
        "logits": LOGIT_BYTES * logits,
    }
    ends = {
        "states": states,
        "gathered": sharded
        * (
            layer * (3 * element + trained * (element + MASTER)) + element * (root + trained * head)
        ),
        "activations": kept + computed,
        "logits": 0,
    }
    parts = max(begins, ends, key=lambda each: sum(each.values()))
    if reference is not None:
        stays = 0 if reference.offload and gpu else shape.parameters
        parts["reference"] = element * (stays // ranks + shape.layer_parameters * (ranks > 1))
    if isinstance(engine, PPOActorConfig) and engine.critic:
        parts["critic"] = parts["states"]
    parts["process"] = CUDA if gpu else PROCESS
    return Need(parts)


def _state_bytes(engine: TrainEngineConfig, shape: ModelShape, element: int, layout: Layout) -> int:
    """Returns the bytes of weights, gradients and moments of all ranks that share one copy."""
    narrow = engine.optimizer is not None and engine.optimizer.moments == "bfloat16"
    each = 2 * MASTER + 2 * BYTES["bfloat16" if narrow else "float32"]
    if engine.lora is None:
        return each * shape.parameters
    heads, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    # An adapter's matrix at the hidden state's end is whole on each rank of a tensor group.
    hidden, spread = 4 * shape.hidden, 2 * heads + 2 * kv
    if not shape.routed:
        hidden, spread = 7 * shape.hidden, spread + 3 * shape.intermediate
    adapters = shape.layers * engine.lora.rank * (hidden * layout.tensor + spread)
    return element * shape.parameters + each * adapters


def choose(
    engine: TrainEngineConfig,
    shape: ModelShape | None,
    setting: Setting,
    there: int,
    reference: RefConfig | None = None,
) -> Checkpointing:
    """Chooses what layers keep: as configured, or the fastest mode that fits.

    Args:
        engine: The trained model's settings.
        shape: Its sizes; None: they are not known.
        setting: Ranks and tokens.
        there: Free bytes on the device; 0: not known.
        reference: As for `trainer_rank`.
    """
    chosen = engine.gradient_checkpointing
    if chosen is not None:
        return ("full" if chosen else "none") if isinstance(chosen, bool) else chosen
    if not setting.gpu:
        return "none"
    if shape is None or not there:
        return "full"
    needs = ((mode, trainer_rank(engine, shape, setting, mode, reference)) for mode in MODES)
    return next((mode for mode, need in needs if need.total <= SURELY * there), "offload")


def choose_chunk(
    engine: TrainEngineConfig,
    shape: ModelShape | None,
    setting: Setting,
    mode: Checkpointing,
    there: int,
    reference: RefConfig | None = None,
) -> int:
    """Chooses the elements of the largest logits tensor for a `mode` that `choose` has returned.

    That mode fits with the smallest chunk: recomputing layers costs more than reading the head's
    weight again.
    """
    if engine.logits_chunk_elements:
        return engine.logits_chunk_elements
    if shape is None or not setting.gpu:
        return LEAST_CHUNK

    def fits(chunk: int) -> bool:
        need = trainer_rank(engine, shape, setting, mode, reference, chunk)
        return need.total <= SURELY * there

    return largest_chunk(shape.vocabulary, fits)


def largest_chunk(vocabulary: int, fits: Callable[[int], bool]) -> int:
    """Returns the elements of a chunk of HEAD_TOKENS tokens, or of half as many until it fits."""
    tokens = HEAD_TOKENS
    while tokens * vocabulary > LEAST_CHUNK and not fits(tokens * vocabulary):
        tokens //= 2
    return max(tokens * vocabulary, LEAST_CHUNK)


def compute_dtype(engine: TrainEngineConfig, *, gpu: bool) -> str:
    """The precision that `dtype: auto` stands for, or the configured one."""
    return engine.dtype if engine.dtype != "auto" else ("bfloat16" if gpu else "float32")


def ways_out(
    need: Need | None, engine: TrainEngineConfig, mode: Checkpointing, setting: Setting
) -> str:
    """Returns settings that reduce a rank's memory, those for its largest part first."""
    lighter = MODES[MODES.index(mode) + 1 : None if setting.gpu else -1]
    tokens = engine.mb_spec.max_tokens_per_mb
    activations = [f"a smaller actor.mb_spec.max_tokens_per_mb ({tokens})"]
    if lighter:
        activations.insert(0, f"actor.gradient_checkpointing={' or '.join(lighter)}")
    states = [f"more ranks to shard over ({setting.layout.ranks})"]
    optimizer = engine.optimizer
    if setting.gpu and optimizer and (optimizer.type, optimizer.moments) == ("adamw", "float32"):
        states.append("actor.optimizer.moments=bfloat16")
    if setting.gpu and not engine.offload and not (optimizer and optimizer.type == "muon"):
        states.append("actor.offload=true")
    ways = {"activations": activations, "states": states, "reference": ["ref.offload=true"]}
    largest = "activations" if need is None else need.largest
    order = sorted(("activations", "states"), key=lambda part: part != largest)
    if largest == "reference":
        order.insert(0, "reference")
    return ", or ".join(way for part in order for way in ways[part])
