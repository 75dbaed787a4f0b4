"""Layers with a state or a convolution on packed sequences: nothing crosses a boundary.

A module with a convolution of its own mixes tokens of its row: gated delta rules, Kimi's variant,
Mamba 1 and 2, short convolutions; so does lightning attention, without one. The architecture's own
forward computes them all, in one of two ways:

    by length         computed tokens -> sequences of similar length, one a row, padded at the end
                      [rows, longest, hidden] -> the module -> back to the computed tokens
    with boundaries   whole sequences end to end [1, tokens, hidden] -> the module, which hands
                      cu_seqlens and seq_idx to its kernels -> back to the computed tokens

By length is right for any causal layer on any device, and uses whatever kernels transformers finds
installed. With boundaries computes no padding, and is used for a class of modules only if a trial
on the device has shown that its kernels heed the boundaries: transformers' functions of torch, and
some versions of the kernels, do not. Both compute whole sequences, so a common prefix costs as
often as it occurs here, and once in the other layers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from areal.chassis.logging import get_logger
from areal.errors import CannotStart, InvalidInput
from areal_torch.algorithms.packing import sequence_index
from areal_torch.engines.model import indexed
from areal_torch.engines.model.attention.layout import PackedLayout, build_layout
from areal_torch.engines.model.indexed import is_indexed

# How modules take the boundaries: `cu_seq_lens_q` is handed on to the kernel as `cu_seqlens`.
_ARGUMENTS = ("cu_seq_lens_q", "cu_seqlens")
_LIGHTNING = "LightningAttention"
"""MiniMax's layer: a state without a convolution."""
_TRIED = (5, 1, 70, 3)
"""Lengths of the trial's sequences: shorter than a convolution, and longer than a chunk."""
_ROUNDING = {torch.float64: 1e-4, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}
"""Largest difference of a trial's outputs, and of its gradients, as a part of their norm."""


def modules_of(decoder: nn.Module) -> list[tuple[str, Any]]:
    """Returns (name, module) of each module that mixes tokens by its own code.

    That is a convolution, a state, or attention to the keys that an indexer picks.
    """
    return [
        (name, module)
        for name, module in decoder.named_modules()
        if _convolves(module) or type(module).__name__.endswith(_LIGHTNING) or is_indexed(module)
    ]


def _convolves(module: nn.Module) -> bool:
    return any(isinstance(child, nn.Conv1d) for child in module.children())


def kind_of(module: Any) -> str:
    """Returns what users call such a layer."""
    if is_indexed(module):
        return indexed.KIND
    own = {name.rpartition(".")[2] for name, _ in module.named_parameters()}
    if type(module).__name__.endswith(_LIGHTNING):
        return "lightning attention"
    if "A_log" not in own:
        return "short convolution"
    if "D" in own:
        return "Mamba 2" if "dt_bias" in own else "Mamba 1"
    return "gated delta rule"


def state_products(module: Any) -> int:
    """Returns the multiplications with the state that one token costs forward.

    A delta rule reads the state, corrects it, and reads it again; others update it and read it.
    """
    if kind_of(module) in ("short convolution", indexed.KIND):
        return 0
    sizes = vars(module)
    if (state := sizes.get("ssm_state_size")) is not None:
        return 2 * int(sizes["intermediate_size"]) * int(state)
    if "num_v_heads" in sizes:
        return 3 * int(sizes["num_v_heads"] * sizes["head_k_dim"] * sizes["head_v_dim"])
    if "num_attention_heads" in sizes:
        return 2 * int(sizes["num_attention_heads"]) * int(sizes["head_dim"]) ** 2
    return 3 * int(sizes["num_heads"]) * int(sizes["head_dim"]) ** 2


def float32_names(module: Any) -> list[str]:
    """Returns a recurrent module's own names of the parameters that stay in float32."""
    delta = kind_of(module) == "gated delta rule"
    return [
        name
        for name, _ in module.named_parameters()
        if name.endswith(("A_log", "dt_bias")) or (delta and "norm" in name.rpartition(".")[0])
    ]


class RecurrentLayers:
    """A model's layers with a state or a convolution, told of each micro-batch's sequences."""

    def __init__(self, hf: Any, decoder: nn.Module, boundaries: Mapping[type, str]) -> None:
        """Takes over the forward of each.

        Args:
            hf: transformers causal language model, as `recompute_layers` leaves it.
            decoder: Its part that maps tokens to hidden states.
            boundaries: From `choose`; the other classes are computed by length.
        """
        self._layout: PackedLayout | None = None
        found = modules_of(decoder)
        self.by_length = any(type(module) not in boundaries for _, module in found)
        """Whether layouts need buckets."""
        self.kinds = sorted({kind_of(module) for _, module in found})
        """Names of the layers' kinds for messages; empty: the model has none."""
        for _, module in found:
            argument = boundaries.get(type(module))
            plain = module.forward
            by_rows = indexed.on_rows(module) if is_indexed(module) else plain
            module.forward = partial(self._forward, plain, by_rows, argument)
        if not found:
            return
        for module in hf.modules():
            # A layer that is computed again needs its own micro-batch's sequences.
            if (run := getattr(module, "_gradient_checkpointing_func", None)) is not None:
                module._gradient_checkpointing_func = partial(self._recompute, run)

    @contextmanager
    def told(self, layout: PackedLayout | None) -> Iterator[None]:
        """Returns a context in which the layers compute packed sequences; None: plain rows."""
        before, self._layout = self._layout, layout
        try:
            yield
        finally:
            self._layout = before

    def _recompute(self, run: Callable[..., Any], forward: Callable[..., Any], *args: Any) -> Any:
        return run(partial(self._forward_told, self._layout, forward), *args)

    def _forward_told(
        self, layout: PackedLayout | None, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        with self.told(layout):
            return forward(*args, **kwargs)

    def _forward(
        self,
        forward: Callable[..., Any],
        by_rows: Callable[..., Any],
        argument: str | None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if self._layout is None:
            return forward(*args, **kwargs)
        if argument is None:
            return by_length(by_rows, self._layout, *args, **kwargs)
        return with_boundaries(forward, argument, self._layout, *args, **kwargs)


def by_length(forward: Callable[..., Any], layout: PackedLayout, *args: Any, **kwargs: Any) -> Any:
    """Computes a causal module on sequences, one a row.

    Args:
        forward: The module's own; its tensors [1, U, ...] get another shape, [rows, longest, ...].
        layout: Has buckets.
        args: And `kwargs`, its arguments for the computed tokens, [1, U, ...].

    Returns:
        What `forward` returns of the computed tokens, [1, U, ...].
    """
    assert layout.output is not None
    parts = []
    for bucket in layout.buckets:
        # Places behind an end hold any token: a causal layer's earlier outputs ignore it.
        rows = _take(layout, bucket.index, (bucket.sequences, bucket.longest), args, kwargs)
        parts.append(pytree.tree_flatten(forward(*rows[0], **rows[1])))
    outputs = zip(*(leaves for leaves, _ in parts), strict=True)
    return pytree.tree_unflatten([_joined(layout, each) for each in outputs], parts[0][1])


def with_boundaries(
    forward: Callable[..., Any], argument: str, layout: PackedLayout, *args: Any, **kwargs: Any
) -> Any:
    """Computes a module on whole sequences end to end, telling its kernels where they begin.

    Args:
        forward: As for `by_length`.
        argument: The keyword by which it takes the boundaries.
        layout: With or without buckets.
        args: As for `by_length`.
        kwargs: As for `by_length`.
    """
    row_args, row_kwargs = _take(layout, layout.locate, (1, len(layout.locate)), args, kwargs)
    told = {argument: layout.cu_seqlens, "seq_idx": sequence_index(layout.cu_seqlens.long())}
    told["seq_idx"] = told["seq_idx"].int()[None]
    output = forward(*row_args, **{**row_kwargs, **told})

    whole = (1, len(layout.locate))

    def computed(value: Any) -> Any:
        per_token = isinstance(value, Tensor) and value.shape[:2] == whole
        return value[:, layout.computed] if per_token else None

    return pytree.tree_map(computed, output)


def _take(
    layout: PackedLayout, index: Tensor, shape: tuple[int, int], args: Any, kwargs: Any
) -> tuple[Any, Any]:
    """Replaces the tokens of arguments: of each tensor [1, U, ...] those of `index`, in `shape`."""
    tokens, taken = len(layout.computed), 0

    def take(value: Any) -> Any:
        nonlocal taken
        if not isinstance(value, Tensor) or value.shape[:2] != (1, tokens):
            return value
        taken += 1
        return value[0][index].view(*shape, *value.shape[2:])

    moved = pytree.tree_map(take, (args, kwargs))
    if not taken:
        raise InvalidInput(f"a recurrent layer gets no tensor of shape [1, {tokens}, ...]")
    return moved  # type: ignore[no-any-return]


def _joined(layout: PackedLayout, values: tuple[Any, ...]) -> Tensor | None:
    """Joins outputs per bucket [rows, longest, ...] to that of the computed tokens [1, U, ...].

    None for any other output: a state has no meaning once its sequence is over.
    """
    shapes = [(bucket.sequences, bucket.longest) for bucket in layout.buckets]
    tensors = [value for value in values if isinstance(value, Tensor)]
    if [tuple(tensor.shape[:2]) for tensor in tensors] != shapes:
        return None
    return torch.cat([tensor.flatten(0, 1) for tensor in tensors])[layout.output][None]


def choose(
    hf: Any, decoder: nn.Module, device: torch.device, compute: torch.dtype, *, trains: bool = True
) -> dict[type, str]:
    """Returns the classes of modules whose kernels heed boundaries on this device; logs it.

    Args:
        hf: transformers causal language model; its parameters may be on the meta device.
        decoder: Its part that maps tokens to hidden states.
        device: The device that computes it.
        compute: Precision of its forward pass.
        trains: Whether gradients flow through it; a frozen model's kernels need no backward.

    Returns:
        For each such class the keyword by which it takes them. Empty on a CPU, which has no such
        kernels.

    Raises:
        CannotStart: A class cannot be computed or trained here at all.
    """
    found = modules_of(decoder)
    if not found:
        return {}
    width = hf.config.get_text_config().hidden_size
    one_of = {type(module): module for _, module in reversed(found)}
    chosen: dict[type, str] = {}
    why: dict[str, str] = {}
    for kind, module in one_of.items() if device.type != "cpu" else ():
        argument, reason = _heeding(module, width, device, compute, trains=trains)
        if argument is None:
            why[kind.__name__] = reason
        else:
            chosen[kind] = argument
    get_logger(__name__).info(
        "recurrent_layers",
        architecture=type(hf).__name__,
        layers=len(found),
        kinds=sorted({kind_of(module) for module in one_of.values()}),
        with_boundaries=[kind.__name__ for kind in chosen],
        by_length=why or [kind.__name__ for kind in one_of if kind not in chosen],
        prefixes="computed in each sequence by these layers",
    )
    return chosen


def _heeding(
    module: Any, width: int, device: torch.device, compute: torch.dtype, *, trains: bool
) -> tuple[str | None, str]:
    """The keyword by which a module's kernels heed boundaries, or why there is none.

    Raises:
        CannotStart: It does not compute plain rows either.
    """
    if not _convolves(module):
        return None, "it has no kernels of its own"
    trial = _Trial(module, width, device, compute, trains=trains)
    try:
        trial.plain()
    except Exception as error:
        raise CannotStart(
            f"{type(module).__name__} does not run on {device}: {_said(error)}; expected versions "
            "of its kernels (flash-linear-attention, causal-conv1d, mamba-ssm) that work with "
            f"torch {torch.__version__}, or none, so that transformers computes it in torch"
        ) from error
    reasons = []
    for argument in _ARGUMENTS:
        try:
            apart = trial.difference(argument)
        except Exception as error:  # a kernel that is absent, or does not run on this device
            reasons.append(f"{argument}: {_said(error)}")
            continue
        if apart <= _ROUNDING[compute]:
            return argument, ""
        reasons.append(f"{argument}: differs by {apart:.1g}")
    return None, "; ".join(reasons)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}, {' '.join(str(error).split())[:200]}"


class _Trial:
    """A few sequences through a copy of a module with random weights."""

    def __init__(
        self,
        module: Any,
        width: int,
        device: torch.device,
        compute: torch.dtype,
        *,
        trains: bool = True,
    ) -> None:
        """Makes the copy.

        Args:
            module: Of a model whose forward was not taken over yet.
            width: Of the hidden states it takes.
            device: The device that computes it.
            compute: Precision of its forward pass.
            trains: Whether its backward pass is tried too.
        """
        self._trains = trains
        tried = copy.deepcopy(module).to_empty(device=device).to(compute).requires_grad_(False)
        if compute.itemsize == 2:
            for name in float32_names(tried):
                parameter = tried.get_parameter(name)
                parameter.data = parameter.float()
        generator = torch.Generator().manual_seed(0)
        for parameter in tried.parameters():
            spread = parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.3
            drawn = torch.randn(parameter.shape, generator=generator) * spread
            parameter.copy_(drawn + (parameter.ndim == 1))
        self._bounds = [0]
        for length in _TRIED:
            self._bounds.append(self._bounds[-1] + length)
        batch = {
            "input_ids": torch.arange(self._bounds[-1]),
            "cu_seqlens": torch.tensor(self._bounds, dtype=torch.int32),
            "group_index": torch.arange(len(_TRIED)),
        }
        self._layout = build_layout(batch, share_prefixes=False).map(lambda t: t.to(device))
        rows = torch.randn(2, self._bounds[-1], width, generator=generator).to(device, compute)
        self._x, self._weight = rows[:1].requires_grad_(), rows[1:]
        self._forward = tried.forward

    def plain(self) -> list[Tensor]:
        """Returns output and, if training, the input's gradient, [1, tokens, hidden], by length."""
        return self._tried(by_length(self._forward, self._layout, self._x))

    def difference(self, argument: str) -> float:
        """Returns how far they are from `plain` if told the boundaries, as a part of their norm."""
        told = with_boundaries(self._forward, argument, self._layout, self._x)
        # The worst sequence: a leak into a short one would be small beside a long one's norm.
        return max(
            float((found - expected)[:, a:b].float().norm() / expected[:, a:b].float().norm())
            for found, expected in zip(self._tried(told), self.plain(), strict=True)
            for a, b in pairwise(self._bounds)
        )

    def _tried(self, output: Any) -> list[Tensor]:
        out: Tensor = pytree.tree_leaves(output)[0]
        if not self._trains:
            return [out.detach()]
        (gradient,) = torch.autograd.grad((out * self._weight).sum(), self._x)
        return [out.detach(), gradient]
