"""Replays the experts that a server chose for each token (rollout routing replay, R3).

    server    router logits -> top-k choice -> weights of the chosen experts
                                   | travels with the trajectory
                                   v
    trainer   router logits -> the same choice -> weights, from its own logits and with gradient

Rounding makes trainer and server choose other experts for some tokens, and such a token has other
logprobs. Replay replaces the choice alone: a router's own code computes everything else, because
what is replaced is its call of `topk` over all experts. A token without a usable choice keeps the
router's own.

A family whose routers are not found, or do not pass the test at the start, is computed without
replay; a warning says so once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from areal.chassis.logging import get_logger
from areal_torch.algorithms.packing import ROUTES, Batch

_TOPK = frozenset({torch.topk, Tensor.topk})
_MASKS = frozenset({torch.masked_fill, Tensor.masked_fill})


def routers_of(hf: Any, decoder: nn.Module) -> dict[int, nn.Module]:
    """Returns the decoder's routers by the number of their layer; empty if it has none.

    A router is a module that calls `topk` and has one matrix [experts, hidden]. A layer with two is
    one of a mixture of another kind, whose choices no server returns: such a model has none.
    """
    hidden = getattr(hf.config.get_text_config(), "hidden_size", 0)
    found: dict[int, nn.Module] = {}
    for name, module in decoder.named_modules():
        forward = inspect.unwrap(type(module).forward)
        code = getattr(forward, "__code__", None)
        if code is None or "topk" not in code.co_names or not _experts(module, hidden):
            continue
        layer = next((int(part) for part in name.split(".") if part.isdigit()), -1)
        if layer < 0 or layer in found:
            return {}
        found[layer] = module
    return found


def _experts(module: nn.Module, hidden: int) -> int:
    """Returns how many experts a router chooses from; 0: it is not a router."""
    matrices = [p for p in module.parameters() if p.ndim == 2 and p.shape[1] == hidden]
    return int(matrices[0].shape[0]) if len(matrices) == 1 else 0


class Routes:
    """A model's routers, told of each micro-batch's routes."""

    def __init__(self, hf: Any, decoder: nn.Module) -> None:
        """Takes over the forward of each router.

        Args:
            hf: transformers causal language model, as `recompute_layers` leaves it.
            decoder: Its part that maps tokens to hidden states.
        """
        config = hf.config.get_text_config()
        self._given: Tensor | None = None
        self._chosen: dict[int, Tensor] | None = None
        self._family = type(hf).__name__
        self._warned = False
        self.refused = ""
        """Why routes are not replayed; "" if they are."""
        self.off = False
        """Whether the model is not a policy in training, so that it always uses its own choice."""
        self.layers = int(getattr(config, "num_hidden_layers", 0))
        self.routers = routers_of(hf, decoder)
        if max(self.routers, default=0) >= self.layers:
            self.routers = {}  # numbered otherwise than layers are
        self.chosen = 0
        """Experts per token, known once the self-test has run."""
        self.experts = 0
        """Number of experts in the layer with the fewest."""
        self.mixture = bool(self.routers or getattr(config, "num_experts_per_tok", None))
        """Whether the model appears to be a mixture of experts."""
        if not self.routers:
            self.refused = "it has no routers that call topk, one in a layer"
            return
        sizes = {layer: _experts(each, config.hidden_size) for layer, each in self.routers.items()}
        self.experts = min(sizes.values())
        for layer, module in self.routers.items():
            experts = sizes[layer]
            module.forward = partial(self._forward, module.forward, layer, experts)
        for module in hf.modules():
            # A layer that is computed again needs its own micro-batch's routes.
            if (run := getattr(module, "_gradient_checkpointing_func", None)) is not None:
                module._gradient_checkpointing_func = partial(self._recompute, run)

    def of(self, batch: Batch) -> Tensor | None:
        """Returns a batch's routes, int16 [T, layers, k]; None: it has none for this model."""
        routes = batch.get(ROUTES)
        if routes is None or self.off:
            return None
        cause = self.refused
        expected = (self.layers, self.chosen or routes.shape[-1])
        if not cause and routes.shape[1:] != expected:
            found = [*routes.shape[1:]]
            cause = f"a batch has routes of [layers, k] {found}, expected {[*expected]}"
        if not cause:
            return routes
        if not self._warned:
            self._warned = True
            get_logger(__name__).warning(
                "routes_not_replayed", architecture=self._family, cause=cause
            )
        return None

    def count(self, batch: Batch) -> tuple[int, int]:
        """Returns how many of a batch's tokens have a route, and how many sequences have none."""
        sequences = len(batch["cu_seqlens"]) - 1
        routes = self.of(batch)
        if routes is None:
            return 0, sequences
        routed = torch.cat([routes.new_zeros(1).long(), has_route(routes).long().cumsum(0)])
        ends = routed[batch["cu_seqlens"].long()]
        return int(routed[-1]), int((ends.diff() == 0).sum())

    @contextmanager
    def switched_off(self) -> Iterator[None]:
        """Returns a context in which batches are computed with the routers' own choice."""
        before, self.off = self.off, True
        try:
            yield
        finally:
            self.off = before

    @contextmanager
    def told(self, given: Tensor | None) -> Iterator[None]:
        """Context in which routers choose what is given, int16 [tokens, layers, k]; None: freely.

        Tokens are those that the decoder computes, in order.
        """
        before, self._given = self._given, given
        try:
            yield
        finally:
            self._given = before

    @contextmanager
    def recorded(self) -> Iterator[dict[int, Tensor]]:
        """Returns a context that yields what routers choose, [tokens, k] by layer."""
        chosen: dict[int, Tensor] = {}
        self._chosen = chosen
        try:
            yield chosen
        finally:
            self._chosen = None

    def _recompute(self, run: Callable[..., Any], forward: Callable[..., Any], *args: Any) -> Any:
        return run(partial(self._forward_told, self._given, forward), *args)

    def _forward_told(
        self, given: Tensor | None, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        with self.told(given):
            return forward(*args, **kwargs)

    def _forward(
        self, forward: Callable[..., Any], layer: int, experts: int, *args: Any, **kwargs: Any
    ) -> Any:
        if self._given is None and self._chosen is None:
            return forward(*args, **kwargs)
        given = None if self._given is None else self._given[:, layer].long()
        choice = _Choice(given, experts)
        with choice:
            found = forward(*args, **kwargs)
        if self._chosen is not None and choice.made is not None:
            self._chosen[layer] = choice.made
        return found


def has_route(routes: Tensor) -> Tensor:
    """Returns which tokens have a route, bool [T], of routes [T, layers, k]."""
    return (routes >= 0).flatten(1).all(1)


class _Choice(TorchFunctionMode):
    """Inside, `topk` over all experts returns the given ones, with the scores that they have."""

    def __init__(self, given: Tensor | None, experts: int) -> None:
        """Takes the experts of each token.

        Args:
            given: int64 [tokens, k]; a row with an expert that does not exist, or with one twice,
                is no choice. None: none is.
            experts: How many there are.
        """
        super().__init__()
        self._given, self._experts = given, experts
        self._usable: Tensor | None = None
        self.made: Tensor | None = None
        """The choice, [tokens, k], once the router has made it."""
        if given is not None:
            ordered = given.sort(-1).values
            distinct = (ordered.diff(dim=-1) > 0).all(-1)
            inside = (ordered[:, 0] >= 0) & (ordered[:, -1] < experts)
            self._usable = (distinct & inside)[:, None]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in _TOPK and func not in _MASKS:
            return found
        scores = args[0] if args else kwargs["input"]
        if scores.ndim != 2 or scores.shape[1] != self._experts:
            return found  # of groups of experts
        if self._given is not None and len(self._given) != len(scores):
            return found  # of other tokens: the test at the start sees that nothing changes
        if func in _MASKS:
            # What limits the choice to some groups does not concern one that is given.
            return found if self._usable is None else torch.where(self._usable, scores, found)
        chosen = found[1]
        if self._usable is not None and self._given is not None:
            if self._given.shape != chosen.shape:
                return found
            chosen = torch.where(self._usable, self._given, chosen)
            found = torch.return_types.topk((scores.gather(1, chosen), chosen))
        self.made = chosen
        return found
