"""Ulysses: a micro-batch's tokens are spread over ranks, and its heads while they attend.

    outside attention    every head of U / c tokens      embedding, projections, MLP, head
          |  all-to-all                   ^
          v                               |  all-to-all
    inside attention     1 / c of the heads of U tokens

All ranks of a context group have the same micro-batch. Each computes its run of the tokens and
their logprobs; the logprobs are then summed, so that every rank has all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

Attention = Callable[..., tuple[Tensor, Any]]


@dataclass(frozen=True)
class Context:
    """The ranks that share the tokens of a micro-batch."""

    group: Any

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    def own(self, tokens: int) -> tuple[int, int]:
        """Returns this rank's first token and its number of tokens; the last may exceed the end.

        Args:
            tokens: Number of tokens in the micro-batch.
        """
        count = -(-tokens // self.size)
        return dist.get_rank(self.group) * count, count

    def cut(self, values: Tensor) -> Tensor:
        """Returns this rank's part of a value per token [U], with zeros after the end."""
        first, count = self.own(len(values))
        padding = count * self.size - len(values)
        return torch.nn.functional.pad(values, (0, padding))[first : first + count]

    def whole(self, part: Tensor) -> Tensor:
        """Returns the values of all ranks' tokens in order [U, ...], and what follows the end."""
        parts = [torch.empty_like(part) for _ in range(self.size)]
        dist.all_gather(parts, part.contiguous(), group=self.group)
        return torch.cat(parts)

    def sum_parts(self, part: Tensor) -> Tensor:
        """Sums the values of all ranks; the gradient of the sum is that of each part."""
        apply: Callable[..., Tensor] = _SumOfParts.apply
        return apply(part, self.group)


def across_ranks(attend: Attention) -> Attention:
    """Makes an attention function work on tokens that are spread over ranks.

    Args:
        attend: Takes [1, heads, U, dim] three times, returns [1, U, heads, dim].

    Returns:
        The same for [1, heads, U / c, dim] where `context` is passed, else `attend` itself.
    """

    def attend_across(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        context: Context | None = None,
        tokens: int = 0,
        **others: Any,
    ) -> tuple[Tensor, Any]:
        if context is None:
            return attend(module, query, key, value, attention_mask, **others)
        if (sinks := others.get("s_aux")) is not None:
            others["s_aux"] = sinks.chunk(context.size)[dist.get_rank(context.group)]
        whole = (_swap(x, 1, 2, context)[:, :, :tokens] for x in (query, key, value))
        out, _ = attend(module, *whole, attention_mask, **others)
        padding = query.shape[2] * context.size - tokens
        out = torch.nn.functional.pad(out, (0, 0, 0, 0, 0, padding))
        return _swap(out, 1, 2, context), None

    return attend_across


def _swap(x: Tensor, split: int, join: int, context: Context) -> Tensor:
    """Splits one dimension over the ranks of the context, and joins another that was split so."""
    apply: Callable[..., Tensor] = _AllToAll.apply
    return apply(x, split, join, context.group)


def _exchange(x: Tensor, split: int, join: int, group: Any) -> Tensor:
    parts = torch.stack([p.contiguous() for p in x.chunk(dist.get_world_size(group), split)])
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return torch.cat(received.unbind(), dim=join)


class _AllToAll(torch.autograd.Function):
    """All-to-all exchange, whose backward pass is the reverse exchange."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, split: int, join: int, group: Any) -> Tensor:
        ctx.back = (join, split, group)
        return _exchange(x, split, join, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(gradient, *ctx.back), None, None, None


class _SumOfParts(torch.autograd.Function):
    """Sum over ranks, all of which compute the same loss of it: each has its gradient already."""

    @staticmethod
    def forward(ctx: FunctionCtx, part: Tensor, group: Any) -> Tensor:
        total = part.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
