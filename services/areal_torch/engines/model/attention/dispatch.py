"""Chooses the kernel for a model's attention, and registers it with transformers.

| kernel | needs | does not compute |
|---|---|---|
| `packed` | nothing: any device and precision | |
| `varlen`, torch's own | a GPU, Ampere or later, 16 bits | softcaps, sinks, heads wider than 256 |
| `varlen_repeat_kv` | the same; copies keys and values to each head | as `varlen` |
| `varlen_cudnn` | the same on Hopper; cuDNN for long sequences | as `varlen`, and windows |
| `flash_attention_2` | the same, and the package flash_attn | sinks, heads wider than 256 |
| `flash_attention_3` | the same on Hopper, and flash_attn_interface | as `varlen` |

All read the same layout, refuse what they do not compute, and work over tokens that are spread over
ranks (`ulysses`). On a GPU a kernel is chosen by trying it (`trial`), not by version.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from areal.chassis.logging import get_logger
from areal.errors import CannotStart, InvalidInput
from areal_torch.engines.model.attention import trial
from areal_torch.engines.model.attention.layout import PackedLayout
from areal_torch.engines.model.attention.packed import packed_attention
from areal_torch.engines.model.attention.ulysses import Attention, across_ranks
from areal_torch.engines.model.attention.varlen import (
    CUDNN,
    CUDNN_FROM,
    FLASH_2,
    FLASH_3,
    PACKAGES,
    TORCH,
    TORCH_REPEATED,
    WIDEST,
    bind,
    varlen_attention,
)
from areal_torch.engines.model.layer_types import CHUNKED
from areal_torch.engines.versions import together

PACKED = "packed"
# `auto` takes the first that works. A user who has built a package wants it to be used.
_PREFERRED = (FLASH_3, FLASH_2, CUDNN, TORCH, TORCH_REPEATED, PACKED)
_AMPERE, _HOPPER = 8, 9  # major compute capabilities


def choose(hf: Any, wanted: str, device: torch.device, compute: torch.dtype) -> str:
    """Returns the attention kernel for a model; on a GPU, one that has been tried there.

    With `auto` it is collective, because all ranks take the same kernel.

    Args:
        hf: transformers causal language model.
        wanted: `auto`, or a kernel.
        device: The device that computes it.
        compute: Precision of its forward pass.

    Raises:
        InvalidInput: The requested kernel cannot compute it.
        CannotStart: The requested kernel, or with `auto` each, was tried and does not work.
    """
    if wanted != "auto":
        if (why := _why_not(wanted, hf, device, compute)) is not None:
            raise InvalidInput(f"attn_impl={wanted}: {why}; expected attn_impl=packed, or auto")
        if (why := _failure(wanted, hf, device, compute)) is not None:
            raise CannotStart(
                f"attn_impl={wanted} does not work on {device} with {together()}: {why}; expected "
                "attn_impl=auto, or another kernel"
            )
        return wanted
    log = get_logger(__name__)
    passed_over: dict[str, str] = {}
    for kernel in _PREFERRED:
        known = _why_not(kernel, hf, device, compute)
        failed = None if known else _failure(kernel, hf, device, compute)
        anywhere, speaks = _anywhere(device, bool(known), bool(failed))
        if not anywhere:
            if passed_over and device.type != "cpu":
                log.info("attention_kernel", kernel=kernel, passed_over=passed_over)
            return kernel
        if speaks:
            log.warning(
                "attention_kernel_failed", kernel=kernel, reason=failed, versions=together()
            )
        passed_over[kernel] = known or failed or "it does not work on another rank"
    reasons = "; ".join(f"{kernel}: {why}" for kernel, why in passed_over.items())
    raise CannotStart(f"no attention kernel works on {device} with {together()}: {reasons}")


def _failure(kernel: str, hf: Any, device: torch.device, compute: torch.dtype) -> str | None:
    """Returns what a kernel does wrong with a few tokens; None: nothing."""
    if device.type == "cpu":  # its only kernel is the one that the tests of this project run
        return None
    try:
        found = [attention_function(kernel)]
        if kernel == CUDNN:  # also what it does with long sequences, and with both in one batch
            found += [attention_function(kernel, cudnn_from=n) for n in (1, trial.MIDDLE)]
        for attend in found:
            for shape in trial.shapes_of(hf.config.get_text_config()):
                why = trial.difference(attend, shape, device, compute, buckets=kernel == PACKED)
                if why is not None:
                    return why
    except Exception as error:
        return in_a_line(error)
    return None


def in_a_line(error: Exception) -> str:
    """Returns an error's message, with its type unless it is ours; at most 200 characters."""
    text = " ".join(str(error).split())[:200]
    return text if isinstance(error, CannotStart) else f"{type(error).__name__}, {text}"


def _anywhere(device: torch.device, known: bool, failed: bool) -> tuple[bool, bool]:
    """Whether a kernel is out on any rank, and whether this rank is to report that it failed.

    Collective on GPUs; each rank asks about every kernel, so the packages of nodes may differ.
    """
    if device.type == "cpu" or not dist.is_initialized() or dist.get_world_size() == 1:
        return known or failed, failed
    first = dist.get_rank() == 0
    flags = torch.tensor([known or failed, failed and first], dtype=torch.int32)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    out, on_first = flags.tolist()
    return bool(out), failed and (first or not on_first)


def _why_not(kernel: str, hf: Any, device: torch.device, compute: torch.dtype) -> str | None:
    """Returns what keeps a kernel from computing a model, without trying it; None: nothing."""
    if kernel == PACKED:
        return None
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
    if kernel == CUDNN and capability < _HOPPER:
        return "the GPU is older than Hopper"
    return "the GPU is older than Ampere" if capability < _AMPERE else None


def _beyond(kernel: str, hf: Any) -> str | None:
    name, config = type(hf).__name__, hf.config.get_text_config()
    if any(parameter.endswith("sinks") for parameter, _ in hf.named_parameters()):
        return f"{name} has attention sinks"
    if kernel != FLASH_2 and getattr(config, "attn_logit_softcapping", None) is not None:
        return f"{name} caps attention scores"
    shapes = trial.shapes_of(config)
    widest = max((max(shape.width, shape.value_width) for shape in shapes), default=0)
    if widest > WIDEST:
        return f"{name} has heads of width {widest}, more than {WIDEST}"
    if kernel == CUDNN and any(shape.window is not None for shape in shapes):
        return f"{name} has sliding windows"
    if kernel == TORCH_REPEATED and all(shape.heads == shape.kv_heads for shape in shapes):
        return f"{name} has keys and values for each head: there is nothing to repeat"
    return None


def registered_name(kernel: str) -> str:
    """Registers a kernel as an attention function of transformers; returns its name there."""
    from transformers import AttentionInterface

    # transformers takes any name with "flash" in it for one of its own.
    name = f"areal_{kernel.replace('flash_attention', 'package')}"
    AttentionInterface.register(name, across_ranks(attention_function(kernel)))
    return name


def attention_function(kernel: str, *, cudnn_from: int = CUDNN_FROM) -> Attention:
    """Returns the attention function that an architecture calls, with its options.

    Args:
        kernel: Its name.
        cudnn_from: For `bind`.

    Raises:
        CannotStart: The installed version of the kernel lacks an argument that is needed.
        ImportError: The kernel is not there.
    """
    compute: Callable[..., Tensor]
    if kernel == PACKED:
        compute = packed_attention
    else:
        compute = partial(varlen_attention, bind(kernel, cudnn_from=cudnn_from))

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
        """Attends within each sequence.

        Args:
            module: Attention module, named in errors.
            query: [1, heads, U, head_dim].
            key: [1, key_value_heads, U, head_dim].
            value: [1, key_value_heads, U, value_dim].
            attention_mask: Always None here.
            packed_layout: From `build_layout`.
            scaling: Factor of the scores; default head_dim ** -0.5.
            sliding_window: Tokens a query looks back at, itself included; None: all.
            softcap: Cap of the scores, as in Gemma 2.
            s_aux: [heads], attention sinks, as in gpt-oss.
            others: Other options of the architecture; refused unless they change nothing.

        Returns:
            [1, U, heads, value_dim], and no weights.

        Raises:
            InvalidInput: The architecture asks for attention that the kernel does not compute.
        """
        others["attention_mask"] = attention_mask
        if kernel != PACKED or softcap is not None:  # no architecture has both
            others["s_aux"] = s_aux
        if kernel not in (PACKED, FLASH_2):
            others["softcap"] = softcap
        layout = _checked(kernel, module, query, key, packed_layout, sliding_window, others)
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        scale = query.shape[3] ** -0.5 if scaling is None else scaling
        sinks = {"sinks": s_aux} if kernel == PACKED else {}
        out = compute(q, k, v, layout, scale, sliding_window, softcap=softcap, **sinks)
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
    """Returns the module's layout, when nothing is asked for that the kernel does not compute."""
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
    config: Any = getattr(module, "config", None)
    layer_types = list(getattr(config, "layer_types", None) or ())
    index = getattr(module, "layer_idx", None)
    kind = layer_types[index] if layer_types and index is not None else None
    window = getattr(config, "sliding_window", None)
    if kind not in (None, "sliding_attention"):
        window = None
    longest = layout.longest
    if sliding_window is None and window is not None and longest > window:
        raise InvalidInput(
            f"{name} does not pass its sliding window of {window} tokens to the attention "
            f"function, so {kernel} attention cannot apply the window to a sequence of "
            f"{longest} tokens"
        )
    if kind == CHUNKED and config is not None:
        return _chunks(name, layout, config.attention_chunk_size)
    return layout


def _chunks(name: str, layout: PackedLayout, size: int) -> PackedLayout:
    if layout.longest <= size:
        return layout
    if layout.chunks is None or layout.chunks.longest != size:
        raise InvalidInput(
            f"{name} attends in chunks of {size} tokens: expected a layout that has them for a "
            f"sequence of {layout.longest} tokens"
        )
    return layout.chunks


def _short(value: Any) -> str:
    return f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
