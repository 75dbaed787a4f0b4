"""The language-model head: from hidden states to the logprobs and entropies of given tokens.

It runs only where a logprob is wanted, in chunks, so that [T, vocabulary] logits never exist at
once for a large vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def chosen_logprobs(
    hf: Any, hidden: Tensor, labels: Tensor, temperature: float, *, chunk_elements: int
) -> tuple[Tensor, Tensor]:
    """Return what `logprobs_of` does, from hidden states [N, dim].

    Args:
        hf: transformers causal language model.
        hidden: of the tokens before the labels.
        labels: int64 [N].
        temperature: > 0.
        chunk_elements: largest logits tensor.
    """

    def chunk(part: Tensor, part_labels: Tensor) -> tuple[Tensor, Tensor]:
        return logprobs_of(_logits(hf, part), part_labels, temperature)

    vocabulary = hf.config.get_text_config().vocab_size
    size = max(1, chunk_elements // vocabulary)
    if len(labels) <= size:
        return chunk(hidden, labels)
    # Logits are computed again in the backward pass, chunk by chunk.
    parts = [
        checkpoint(chunk, part, part_labels, use_reentrant=False)
        for part, part_labels in zip(
            torch.split(hidden, size), torch.split(labels, size), strict=True
        )
    ]
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def _logits(hf: Any, hidden: Tensor) -> Tensor:
    """The head, and what the architecture does to its output."""
    config = hf.config.get_text_config()
    logits: Tensor = hf.get_output_embeddings()(hidden)
    scale = _logit_scale(config)
    if scale != 1.0:
        logits = logits * scale
    cap = getattr(config, "final_logit_softcapping", None)
    return logits if cap is None else torch.tanh(logits / cap) * cap


def _logit_scale(config: Any) -> float:
    """Return the factor that the architecture puts on its logits."""
    scale = float(getattr(config, "logit_scale", None) or 1.0)  # Cohere
    scaling = float(getattr(config, "logits_scaling", None) or 1.0)
    # Granite divides by it, HyperCLOVA X multiplies.
    return scale * (scaling if config.model_type == "hyperclovax" else 1.0 / scaling)


def logprobs_of(logits: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return log_softmax(logits / temperature) at the labels, and the entropies without gradient.

    Args:
        logits: [N, vocabulary].
        labels: int64 [N].
        temperature: > 0.

    Returns:
        Two tensors [N], float32 (float64 for float64 logits).
    """
    if logits.dtype != torch.float64:
        logits = logits.float()
    if temperature != 1.0:
        logits = logits / temperature
    everything = torch.log_softmax(logits, -1)
    logprobs = -torch.nn.functional.nll_loss(everything, labels, reduction="none")
    with torch.no_grad():
        entropies = -(everything.exp() * everything).sum(-1)
    return logprobs, entropies
