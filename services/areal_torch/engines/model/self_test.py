"""Tests every model at the start: compares packed logprobs with those of plain transformers.

    two groups, packed, prefixes once     -> logprobs of the model that is trained
    each sequence alone, eager attention  -> logprobs of the same weights
                                             mean difference above the tolerance: no run

In 16 bits, rounding makes a router choose other experts for some tokens in the two passes, which
differ by more than rounding then. So if a mixture of experts exceeds the tolerance there, the
second pass repeats the choice of the first, and what differs still is an error.

If an architecture that was never tried, or a new version of transformers, computes something else,
the run ends in its first seconds instead of training on wrong gradients. For a large model the
first layers are enough, with at least one of each kind, because each rank of a sharded model
gathers every layer that is tested. What begins after thousands of tokens in a real model, chunks of
attention for example, begins after a few in both passes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from areal.errors import CannotStart, InvalidInput
from areal_torch.algorithms import packing
from areal_torch.algorithms.packing import ROUTES, Batch
from areal_torch.engines.model.attention.dispatch import in_a_line
from areal_torch.engines.model.fill import local
from areal_torch.engines.model.guards import (
    decoder_of,
    is_scalar,
    layer_classes,
    placeholders,
    refusal,
    use_attention,
)
from areal_torch.engines.model.heads import LogprobHead, logprobs_of
from areal_torch.engines.model.packed import PackedCausalLM
from areal_torch.engines.model.positions import counting
from areal_torch.engines.versions import accepted, together

TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3, torch.bfloat16: 5e-2}
"""Largest mean difference of logprobs, in nats. Rounding makes about 1e-6 in float32 and 1e-2 in
bfloat16; a mask, a sink or a state that is wrong makes 1e-2 to 9."""

# Models up to this many parameters are run whole.
WHOLE = 50_000_000
_FEWEST_LAYERS = 4
# For each group, the length of the common prefix, then what each sequence adds.
_GROUPS = ((12, (8, 5)), (9, (11, 1)))
# Chunks of attention, and the steps of queries' scales; no prefix above ends at a multiple.
_SPAN = 5


@dataclass(frozen=True)
class SelfTest:
    """The results; differences in nats."""

    architecture: str
    attention: str
    dtype: str
    layers: int
    """Number of leading layers that took part; 0: unknown, or all did."""
    difference: float
    """Mean difference over tokens."""
    tolerance: float
    seconds: float
    replays_routes: bool = False
    """Whether the model takes the server's choice of experts; see `model.routes`."""


def self_test(model: PackedCausalLM, device: torch.device, compute: torch.dtype) -> SelfTest:
    """Compares packed logprobs with those of each sequence alone; collective if it is sharded.

    Args:
        model: Has its weights, on `device` or sharded; the test does not change them.
        device: The device that trains it.
        compute: Precision of its forward pass.

    Raises:
        InvalidInput: They differ, or the model asks for what its attention does not compute.
        CannotStart: It does not run at all, such as with a version that lacks an argument.
    """
    try:
        with _first_layers(model) as layers, _short_spans(model.hf):
            return _compare(model, device, compute, layers)
    finally:
        # A forward pass leaves embedding and head gathered, and the optimizer would update copies.
        if isinstance(model, FSDPModule):
            model.reshard()


def _compare(
    model: PackedCausalLM, device: torch.device, compute: torch.dtype, layers: int
) -> SelfTest:
    started = time.perf_counter()
    config = model.hf.config
    batch = _batch(config.get_text_config().vocab_size, placeholders(config))
    batch = {key: value.to(device) for key, value in batch.items()}
    try:
        # First, so that FSDP takes the whole model for the root of its tree.
        found = _packed(model, batch)
        expected = _alone(model, batch)
    except InvalidInput as error:
        raise refusal(model.hf, str(error)) from None
    except Exception as error:
        # A call that a version does not take, or a kernel that a GPU lacks: not the model's fault.
        odd = isinstance(error, (AttributeError, ImportError, NotImplementedError, TypeError))
        raise CannotStart(
            f"model {type(model.hf).__name__} does not run with {model.kernel} attention on "
            f"{device} with {together()}: {in_a_line(error)}"
            + (f"; expected {accepted()}, or another attn_impl" if odd else "")
        ) from error
    difference = _mean(found, expected)
    if not difference <= TOLERANCE[compute] and compute.itemsize == 2 and model.routes.routers:
        difference = _with_one_choice(model, batch)
    result = SelfTest(
        architecture=type(model.hf).__name__,
        attention=model.kernel,
        dtype=str(compute).removeprefix("torch."),
        layers=layers,
        difference=difference,
        tolerance=TOLERANCE[compute],
        seconds=time.perf_counter() - started,
    )
    if not result.difference <= result.tolerance:  # NaN is not
        if not bool(expected.isfinite().all()):  # transformers' own: no matter of packing
            raise InvalidInput(f"model {type(model.hf).__name__}: {_not_finite(model.hf)}")
        raise refusal(
            model.hf,
            f"logprobs differ by {result.difference:.2g} nats a token from those of each sequence "
            f"alone, more than {result.tolerance:g} ({result.dtype}, {model.kernel} attention)",
        )
    routes = model.routes
    if routes.off or not routes.routers:
        return result
    _test_routes(model, batch, result.tolerance)
    return replace(result, replays_routes=not routes.refused)


def _not_finite(hf: Any) -> str:
    """Returns why logprobs are not finite, from this rank's part of the weights."""
    for name, parameter in hf.named_parameters():
        if not bool(local(parameter.detach()).isfinite().all()):
            return f"tensor {name!r} holds NaN or infinity; expected finite weights"
    return "logprobs are not finite; expected finite numbers in its weights and its config.json"


def _mean(found: Tensor, expected: Tensor) -> float:
    """Mean difference over tokens, in nats."""
    return float((found - expected).abs().mean())


def _with_one_choice(model: PackedCausalLM, batch: Batch) -> float:
    """Mean difference of the two passes if both take the experts that the packed one chooses."""
    found, chosen = _recorded(model, batch)
    return _mean(found, _alone(model, batch, chosen))


def _recorded(model: PackedCausalLM, batch: Batch) -> tuple[Tensor, Tensor | None]:
    """Logprobs, and the routers' choice for each token, int16 [T, layers, k]; None: not known.

    A token's experts are in ascending order, as a trajectory has them. -1 stands for layers without
    a router that calls topk over all experts.
    """
    routes = model.routes
    with routes.recorded() as chosen:
        found = _packed(model, batch)
    tested = [layer for layer in routes.routers if layer in chosen]
    if not tested:
        return found, None
    layout = model.plan(batch, share_prefixes=True)
    shape = (len(batch["input_ids"]), routes.layers, chosen[tested[0]].shape[1])
    own = torch.full(shape, -1, dtype=torch.int16, device=batch["input_ids"].device)
    for layer in tested:
        whole = model.context.whole(chosen[layer]) if model.context else chosen[layer]
        own[:, layer] = whole[layout.locate].sort(-1).values.to(torch.int16)
    return found, own


def _test_routes(model: PackedCausalLM, batch: Batch, tolerance: float) -> None:
    """Replays the routers' own choice, and another; a model that ignores either replays nothing."""
    routes = model.routes
    free, own = _recorded(model, batch)
    if own is None:
        routes.refused = "none of its routers chose with topk over all experts"
        return
    count = routes.experts
    routes.chosen = own.shape[2]
    other = torch.where(own < 0, own, (own + 1) % count)
    same, changed = (_packed(model, {**batch, ROUTES: each}) for each in (own, other))
    off, moved = (_mean(each, free) for each in (same, changed))
    if not off <= tolerance:
        routes.refused = f"its own choice, replayed, changes logprobs by {off:.2g} nats a token"
    elif routes.chosen < count and not moved > 0:
        routes.refused = "another choice, replayed, changes nothing"


def _batch(vocabulary: int, reserved: Sequence[int]) -> Batch:
    """Makes a batch of random tokens but those that stand for images or sounds."""
    generator = torch.Generator().manual_seed(0)
    other = next(token for token in range(vocabulary) if token not in reserved)

    def tokens(count: int) -> list[int]:
        drawn = torch.randint(vocabulary, (count,), generator=generator).tolist()
        return [other if token in reserved else token for token in drawn]

    sequences, groups = [], []
    for group, (common, added) in enumerate(_GROUPS):
        prefix = tokens(common)
        for count in added:
            ids = prefix + tokens(count)
            sequences.append({"input_ids": ids, "loss_mask": [False] + [True] * (len(ids) - 1)})
            groups.append(group)
    return packing.pack(sequences, groups)


@torch.no_grad()
def _packed(model: PackedCausalLM, batch: Batch) -> Tensor:
    layout = model.plan(batch, share_prefixes=True)
    head = _Probe() if is_scalar(model.hf) else LogprobHead()
    found: Tensor
    found, _ = model(batch, layout, torch.nonzero(batch["loss_mask"]).flatten(), head)
    return found


@torch.no_grad()
def _alone(model: PackedCausalLM, batch: Batch, chosen: Tensor | None = None) -> Tensor:
    """`chosen`: the experts of each token, int16 [T, layers, k]; None: routers choose."""
    hf, bounds = model.hf, pairwise(batch["cu_seqlens"].tolist())
    if isinstance(model, FSDPModule):
        model.unshard()  # what the root gathers: embedding and head
    packed = hf.config.get_text_config()._attn_implementation
    hf.set_attn_implementation("eager")
    parts = []
    try:
        with _not_compiled():
            for start, end in bounds:
                ids = batch["input_ids"][start:end]
                with model.routes.told(None if chosen is None else chosen[start:end]):
                    parts.append(_plain(hf, ids))
    finally:
        use_attention(hf, packed)
    return torch.cat(parts)


def _plain(hf: Any, ids: Tensor) -> Tensor:
    """What `_packed` finds for one sequence, as transformers computes it."""
    if is_scalar(hf):
        found = decoder_of(hf)(input_ids=ids[None], use_cache=False)
        return _project(found.last_hidden_state[0, :-1])
    logits = hf(input_ids=ids[None], use_cache=False).logits[0, :-1]
    logprobs: Tensor = logprobs_of(logits, ids[1:], 1.0)[0]
    return logprobs


def _not_compiled() -> AbstractContextManager[Any]:
    """Leaves layers uncompiled that are called inside, also those that are recomputed."""
    # Importing it takes seconds; without it nothing is compiled.
    loaded = "torch._dynamo" in sys.modules
    return torch.compiler.set_stance("force_eager") if loaded else nullcontext()


class _Probe:
    """A scalar model's own head may be 0, which hides everything."""

    shift = 1

    def read(
        self, hf: Any, hidden: Tensor, batch: Batch, targets: Tensor, *, chunk_elements: int
    ) -> tuple[Tensor, Tensor]:
        found = _project(hidden)
        return found, torch.zeros_like(found)


def _project(hidden: Tensor) -> Tensor:
    """Returns one number of about 1 from each hidden state."""
    wide = hidden if hidden.dtype == torch.float64 else hidden.float()
    signs = torch.arange(wide.shape[-1], device=wide.device).remainder(3).sub(1)
    return (wide * signs).sum(-1).div(wide.shape[-1] ** 0.5)


@contextmanager
def _first_layers(model: PackedCausalLM) -> Iterator[int]:
    """Leaves a big model its first layers only, inside the context; yields how many."""
    hf = model.hf
    layers = _layers_of(hf)
    small = sum(p.numel() for p in hf.parameters()) <= WHOLE
    if layers is None or small:
        yield len(layers or ())
        return
    kinds = [_kind(hf, number, layer) for number, layer in enumerate(layers)]
    needed = max(kinds.index(kind) for kind in kinds) + 1
    if isinstance(model, FSDPModule):
        # FSDP makes its plan of all layers once, else at the first forward pass: now they are here.
        model._get_fsdp_state()._lazy_init()
    everything = layers._modules
    layers._modules = dict(list(everything.items())[: max(needed, _FEWEST_LAYERS)])
    try:
        yield len(layers)
    finally:
        layers._modules = everything


@contextmanager
def _short_spans(hf: Any) -> Iterator[None]:
    """Lets chunks and steps be as short as the test's sequences need, inside the context."""
    before: list[tuple[Any, str, int]] = []
    for owner in (hf.config.get_text_config(), *counting(decoder_of(hf))):
        for name in ("attention_chunk_size", "floor_scale"):
            if (value := vars(owner).get(name)) is not None:
                before.append((owner, name, value))
    try:
        for owner, name, value in before:
            setattr(owner, name, min(value, _SPAN))
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def _layers_of(hf: Any) -> nn.ModuleList | None:
    classes = layer_classes(hf)
    for module in decoder_of(hf).modules():
        if not isinstance(module, nn.ModuleList):
            continue
        # FSDP makes a subclass of each layer's class.
        if {kind.__name__ for each in module for kind in type(each).__mro__} & classes:
            return module
    return None


def _kind(hf: Any, number: int, layer: nn.Module) -> tuple[Any, ...]:
    layer_types = getattr(hf.config.get_text_config(), "layer_types", None)
    parts = tuple((name, type(module).__name__) for name, module in layer.named_modules())
    return (layer_types[number] if layer_types else None, parts)
