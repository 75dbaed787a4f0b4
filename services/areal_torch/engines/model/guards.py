"""Refuses architectures that packed attention would compute wrong, as far as a model shows it.

Sequences lie end to end in one row. That is correct if tokens affect each other only in attention
and in recurrent layers, and if this package's functions compute both. A model that visibly differs
is refused here, in one line; the self-test finds the others.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from torch import nn

from areal.errors import InvalidInput
from areal_torch.engines.model import vision
from areal_torch.engines.model.attention.dispatch import registered_name
from areal_torch.engines.model.indexed import LAYER as INDEXED_LAYER
from areal_torch.engines.model.layer_types import (
    CHUNKED,
    RECURRENT,
    TOKENWISE,
    attention_layers,
    chunk_sizes,
    layer_types,
)
from areal_torch.engines.model.recurrent import modules_of as recurrent_modules

# Layers in which tokens meet in attention only.
_ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention", "attention", CHUNKED})
# Attention beside a layer with a state.
_HYBRID_LAYERS = frozenset({"hybrid", "hybrid_sliding"})


def refuse_unsupported(hf: Any) -> None:
    """Refuses an architecture that is visibly not made for packed sequences.

    Args:
        hf: transformers causal language model.

    Raises:
        InvalidInput: The message says what is wrong, why, and what to do.
    """
    config = hf.config.get_text_config()
    kinds, recurrent = layer_types(config), recurrent_modules(decoder_of(hf))
    stateful = RECURRENT | _HYBRID_LAYERS | {INDEXED_LAYER}
    known = _ATTENTION_LAYERS | TOKENWISE
    if sum(kind in stateful for kind in kinds) <= len(recurrent):
        known |= stateful
    other = sorted({str(kind) for kind in kinds} - known)
    if other:
        raise refusal(hf, f"layers of type {', '.join(other)}, not full or sliding attention")
    if (sizes := chunk_sizes(config)) and (len(sizes) > 1 or not sizes[0]):
        raise refusal(
            hf,
            f"chunked attention with attention_chunk_size {', '.join(map(str, sizes))}, not one "
            "number of tokens for all such layers",
        )
    if hf._is_stateful and not recurrent:
        raise refusal(hf, "a state that carries over from one packed sequence to the next")
    if (
        attention_layers(config)
        and "position_ids" not in inspect.signature(decoder_of(hf).forward).parameters
    ):
        raise refusal(hf, "positions are counted from the start of the packed row")
    for module in decoder_of(hf).modules():
        if getattr(module, "is_causal", True) is False:
            raise refusal(hf, f"{type(module).__name__} lets tokens see later tokens")
    names = [id(p) for _, p in decoder_of(hf).named_parameters(remove_duplicate=False)]
    if len(set(names)) < len(names):
        raise refusal(hf, "layers that share their weights, which ranks cannot gather one by one")
    if hf.get_output_embeddings() is None and not is_scalar(hf):
        raise refusal(hf, "no language-model head")


def is_scalar(hf: Any) -> bool:
    """Returns whether a model's head returns one number instead of logits."""
    return hasattr(hf, "score")


def refusal(hf: Any, what: str) -> InvalidInput:
    """Returns the error of a model that cannot be trained, with the reason."""
    return InvalidInput(
        f"model {type(hf).__name__} cannot be trained on packed sequences: {what}; "
        "choose another model (docs/models.md)"
    )


def set_attention(hf: Any, kernel: str) -> None:
    """Makes a kernel compute all of the model's attention.

    Raises:
        InvalidInput: The architecture has attention of its own.
    """
    name = registered_name(kernel)
    if not hf._can_set_attn_implementation():
        raise refusal(hf, "custom attention, which lets packed sequences see one another")
    use_attention(hf, name)
    for module in decoder_of(hf).modules():
        kind = type(module).__name__
        stays = getattr(getattr(module, "config", None), "_attn_implementation", name)
        if stays != name and "Attention" in kind:
            raise refusal(hf, f"attention that stays {stays} in {kind}")


def use_attention(hf: Any, name: str) -> None:
    """Lets the layers of text call an attention function that is registered in transformers."""
    hf.set_attn_implementation(name)
    if vision.sees(hf):  # patches of an image see all others
        hf.set_attn_implementation({"vision_config": "sdpa"})


def decoder_of(hf: Any) -> nn.Module:
    """Returns the part that maps tokens to the hidden states that the head reads.

    In a model of text and images it is the language tower.
    """
    several = hf.config.get_text_config() is not hf.config
    decoder: Any = hf.get_decoder() if several or hf.base_model is hf else hf.base_model
    # Llama 4's prefix is not the name of its decoder, so transformers returns it with its head.
    found: nn.Module = (
        getattr(decoder, "model", decoder) if hasattr(decoder, "lm_head") else decoder
    )
    return found


def layer_classes(hf: Any) -> set[str]:
    """Names of the classes of a model's layers; empty if it has none.

    A model that names none (`biogpt` and `ctrl`, say) has those of its outermost list of modules;
    lists inside layers, of experts, may be longer.
    """
    if hf._no_split_modules:
        return set(hf._no_split_modules)
    found = [
        (name.count("."), -len(each), each)
        for name, each in decoder_of(hf).named_modules()
        if isinstance(each, nn.ModuleList)
    ]
    return (
        {type(each).__name__ for each in min(found, key=lambda one: one[:2])[2]} if found else set()
    )


def freeze_towers(hf: Any) -> None:
    """Freezes the parts that only images and sounds reach, if no batch can have any."""
    for module, name in _of_towers(hf):
        if (parameter := module._parameters.get(name)) is not None:
            parameter.requires_grad_(False)


def drop_towers(hf: Any) -> frozenset[str]:
    """Takes the tensors of the same parts out of a model; returns their names in it.

    What is left needs no memory for them and trains text. A model whose decoder is all there is
    loses nothing.
    """
    before = set(hf.state_dict(keep_vars=True))
    for module, name in list(_of_towers(hf)):
        (module._parameters if name in module._parameters else module._buffers)[name] = None
    return frozenset(before - set(hf.state_dict(keep_vars=True)))


def _of_towers(hf: Any) -> Iterator[tuple[nn.Module, str]]:
    """Yields (module, name) of each tensor that only images and sounds reach."""
    if hf.config.get_text_config() is hf.config or vision.sees(hf):
        return
    parts = filter(None, (decoder_of(hf), hf.get_output_embeddings()))
    used = {id(module) for part in parts for module in part.modules()}
    for module in hf.modules():
        if id(module) in used:
            continue
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                yield module, name


def placeholders(config: Any) -> list[int]:
    """Returns the placeholder tokens that a model replaces with images or sounds."""
    names = (
        f"{kind}_token_{end}" for kind in ("image", "video", "audio") for end in ("id", "index")
    )
    values = {getattr(config, name, None) for name in names}
    return sorted(value for value in values if isinstance(value, int))


def rope_limit(config: Any) -> int | None:
    """Returns the longest sequence whose rope does not depend on its neighbors; None: any length.

    Beyond it, transformers gives every sequence of a micro-batch the rope of the longest.
    """
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    limits = []
    for each in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
        kind = each.get("rope_type") or "default"
        if "dynamic" in kind:
            limits.append(text.max_position_embeddings)
        elif kind == "longrope":
            limits.append(each["original_max_position_embeddings"])
    return min(limits, default=None)


def silence_noise(hf: Any) -> None:
    """Puts the model into eval(), because PPO needs each forward pass to compute the same function.

    Dropout goes, and routers pick experts as they do in generation. Dropouts are set to 0 as well
    for the layers that `recompute_layers` leaves in train().
    """
    hf.eval()
    for module in hf.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and "drop" in name:
                setattr(module, name, 0.0)
