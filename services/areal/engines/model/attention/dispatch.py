"""Chooses the kernel for a model's attention, and registers it with transformers.

| kernel | needs | does not compute |
|---|---|---|
| `packed` | nothing: any device and precision | |
| `varlen`, torch's own | a GPU, Ampere or later, 16 bits | softcaps, sinks, heads wider than 256 |
| `flash_attention_2` | the same, and the package flash_attn | sinks, heads wider than 256 |
| `flash_attention_3` | the same on Hopper, and flash_attn_interface | as `varlen` |

All read the same layout, refuse what they do not compute, and work over tokens that are spread over
ranks (`ulysses`).
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from areal.engines.model.attention.layout import PackedLayout
from areal.engines.model.attention.packed import packed_attention
from areal.engines.model.attention.ulysses import Attention, across_ranks
from areal.engines.model.attention.varlen import (
    FLASH_2,
    FLASH_3,
    PACKAGES,
    TORCH,
    WIDEST,
    varlen_attention,
)
from areal.errors import InvalidInput

PACKED = "packed"
# `auto` takes the first that can. Torch's comes before flash_attn, whose kernels it has: there is
# nothing to build, and torch.compile looks through it.
_PREFERRED = (FLASH_3, TORCH, FLASH_2)
_AMPERE, _HOPPER = 8, 9  # major compute capabilities


def choose(hf: Any, wanted: str, device: torch.device, compute: torch.dtype) -> str:
    """Return the attention kernel for a model.

    Args:
        hf: transformers causal language model.
        wanted: `auto`, or a kernel.
        device: the device that computes it.
        compute: precision of its forward pass.

    Raises:
        InvalidInput: the requested kernel cannot compute it.
    """
    if wanted == "auto":
        can = (kernel for kernel in _PREFERRED if _why_not(kernel, hf, device, compute) is None)
        return next(can, PACKED)
    if wanted != PACKED and (why := _why_not(wanted, hf, device, compute)) is not None:
        raise InvalidInput(f"attn_impl={wanted}: {why}; expected attn_impl=packed, or auto")
    return wanted


def _why_not(kernel: str, hf: Any, device: torch.device, compute: torch.dtype) -> str | None:
    """What keeps a kernel other than `packed` from computing a model; None: nothing."""
    return _missing(kernel, device, compute) or _beyond(kernel, hf)


def _missing(kernel: str, device: torch.device, compute: torch.dtype) -> str | None:
    if device.type != "cuda":
        return f"the device is a {device.type}, not a GPU"
    if compute not in (torch.bfloat16, torch.float16):
        return f"it computes only with 16 bits, not {str(compute).removeprefix('torch.')}"
    package = PACKAGES.get(kernel)
    if package is not None and find_spec(package) is None:
        return f"the package {package} is not installed"
    capability = torch.cuda.get_device_capability(device)[0]
    if kernel == FLASH_3 and capability != _HOPPER:
        return "the GPU is not a Hopper"
    return "the GPU is older than Ampere" if capability < _AMPERE else None


def _beyond(kernel: str, hf: Any) -> str | None:
    name, config = type(hf).__name__, hf.config.get_text_config()
    if any(parameter.endswith("sinks") for parameter, _ in hf.named_parameters()):
        return f"{name} has attention sinks"
    if kernel != FLASH_2 and getattr(config, "attn_logit_softcapping", None) is not None:
        return f"{name} caps attention scores"
    if (width := _widest_head(config)) > WIDEST:
        return f"{name} has heads of width {width}, more than {WIDEST}"
    return None


def _widest_head(config: Any) -> int:
    def width(key: str) -> int:
        return int(getattr(config, key, None) or 0)

    return max(
        width("head_dim") or config.hidden_size // config.num_attention_heads,
        width("global_head_dim"),
        width("v_head_dim"),
        width("qk_nope_head_dim") + width("qk_rope_head_dim"),
    )


def registered_name(kernel: str) -> str:
    """Register a kernel as an attention function of transformers; returns its name there."""
    from transformers import AttentionInterface

    # transformers takes any name with "flash" in it for one of its own.
    name = f"areal_{kernel.replace('flash_attention', 'package')}"
    AttentionInterface.register(name, across_ranks(attention_function(kernel)))
    return name


def attention_function(kernel: str) -> Attention:
    """Return the attention function that an architecture calls, with its options."""

    def attend(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_layout: PackedLayout | None = None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        """Attend within each sequence.

        Args:
            module: attention module, named in errors.
            query: [1, heads, U, head_dim].
            key: [1, key_value_heads, U, head_dim].
            value: [1, key_value_heads, U, value_dim].
            attention_mask: always None here.
            packed_layout: from `build_layout`.
            scaling: factor of the scores; default head_dim ** -0.5.
            sliding_window: tokens a query looks back at, itself included; None: all.
            softcap: cap of the scores, as in Gemma 2.
            s_aux: [heads], attention sinks, as in gpt-oss.
            others: other options of the architecture; refused unless they change nothing.

        Returns:
            [1, U, heads, value_dim], and no weights.

        Raises:
            InvalidInput: the architecture asks for attention that the kernel does not compute.
        """
        others["attention_mask"] = attention_mask
        if kernel != PACKED or softcap is not None:  # no architecture has both
            others["s_aux"] = s_aux
        if kernel not in (PACKED, FLASH_2):
            others["softcap"] = softcap
        layout = _checked(kernel, module, query, key, packed_layout, sliding_window, others)
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        scale = query.shape[3] ** -0.5 if scaling is None else scaling
        window = sliding_window
        if kernel == PACKED:
            out = packed_attention(q, k, v, layout, scale, window, softcap=softcap, sinks=s_aux)
        else:
            out = varlen_attention(kernel, q, k, v, layout, scale, window, softcap=softcap)
        return out[None], None

    return attend


# What architectures pass along that changes nothing here, and for which values; None never does.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "dropout": (0, 0.0),  # switched off when the model is loaded
    "is_causal": (True,),  # it always is
    "output_attentions": (False,),
    "output_hidden_states": (False,),
    "output_router_logits": (False,),
    "use_cache": (False,),
    "return_dict": (True, False),
}
# Queries and keys come with their positions applied.
_APPLIED = frozenset({"position_ids"})


def _checked(
    kernel: str,
    module: Any,
    query: Tensor,
    key: Tensor,
    layout: PackedLayout | None,
    sliding_window: int | None,
    others: dict[str, Any],
) -> PackedLayout:
    """Return the layout, when nothing is asked for that the kernel does not compute."""
    name = type(module).__name__
    if layout is None:
        raise InvalidInput(
            f"{name} is not told how the batch is packed: expected decoder layers that pass "
            "keyword arguments on to attention"
        )
    unknown = [
        f"{argument}={_short(value)}"
        for argument, value in others.items()
        if value is not None
        and argument not in _APPLIED
        and (isinstance(value, Tensor) or value not in _NEUTRAL.get(argument, ()))
    ]
    if unknown:
        raise InvalidInput(
            f"{name} calls attention with {', '.join(unknown)}, "
            f"which {kernel} attention does not support"
        )
    tokens = len(layout.computed)
    if not query.shape[2] == key.shape[2] == tokens:
        raise InvalidInput(
            f"{name} attends from {query.shape[2]} positions to {key.shape[2]}: {kernel} attention "
            f"expects {tokens} of each, one for each token of the batch"
        )
    config = getattr(module, "config", None)
    layer_types = list(getattr(config, "layer_types", None) or ())
    index = getattr(module, "layer_idx", None)
    window = getattr(config, "sliding_window", None)
    if layer_types and index is not None and layer_types[index] != "sliding_attention":
        window = None
    longest = layout.longest
    if sliding_window is None and window is not None and longest > window:
        raise InvalidInput(
            f"{name} does not pass its sliding window of {window} tokens to the attention "
            f"function, so {kernel} attention cannot apply the window to a sequence of "
            f"{longest} tokens"
        )
    return layout


def _short(value: Any) -> str:
    return f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
