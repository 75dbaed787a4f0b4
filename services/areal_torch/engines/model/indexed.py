"""Attention whose indexer picks the keys of each query, as in DeepSeek V3.2 and GLM-5.

The architecture's own forward computes it on whole sequences, one a row (`recurrent.by_length`),
eagerly and with a causal mask, as transformers runs it: the indexer picks among a sequence's own
tokens, and gets no gradient. Memory grows with the square of a sequence's length.

Scores are cut off at zero, so a tiny indexer of few heads has ties, among which torch picks by the
length of the row: the self-test refuses such a model. Real ones have 32 heads and more.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

KIND = "indexed attention"
LAYER = "indexed_attention"
"""Name of this layer type in a config."""


def is_indexed(module: Any) -> bool:
    """Returns whether a module is such an attention; one that reuses an earlier choice is, too."""
    return hasattr(module, "indexer") and hasattr(module, "is_causal")


def on_rows(module: Any) -> Callable[..., Any]:
    """Returns a forward for rows of sequences [rows, longest, hidden], padded at their ends."""
    module.config = copy.copy(module.config)
    module.config._attn_implementation = "eager"
    if module.indexer is not None:
        module.indexer.requires_grad_(False)
    return partial(_forward, module.forward, module.config.index_topk)


def _forward(
    forward: Callable[..., Any], topk: int, hidden_states: Tensor, *args: Any, **kwargs: Any
) -> Any:
    longest = hidden_states.shape[1]
    if kwargs.get("attention_mask") is None:
        least = torch.finfo(hidden_states.dtype).min
        mask = hidden_states.new_full((longest, longest), least).triu(1)
        kwargs["attention_mask"] = mask.expand(len(hidden_states), 1, -1, -1)
    if (earlier := kwargs.get("prev_topk_indices")) is not None:
        # Places behind a row's end hold any token, and so another row's choice.
        kwargs["prev_topk_indices"] = earlier.clamp(max=longest - 1)
    first, *others = forward(hidden_states, *args, **kwargs)
    return (first, *(_as_wide(each, topk) for each in others))


def _as_wide(chosen: Any, topk: int) -> Any:
    """Repeats a choice among few keys, so that rows of all lengths have equally many."""
    if not isinstance(chosen, Tensor) or chosen.is_floating_point():
        return None  # weights of attention
    lacking = topk - chosen.shape[-1]
    return torch.cat([chosen, chosen[..., :1].expand(*chosen.shape[:-1], lacking)], dim=-1)
