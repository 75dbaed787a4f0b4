"""Heads compute values from hidden states. An algorithm is a head, a loss, and keys of a batch.

    LogprobHead      logprobs of tokens, or of given ids each, and entropies      a policy
    TopLogprobHead   the k likeliest ids of each token and their logprobs         a teacher
    ScalarHead       one number: a state's value, a response's score              a critic, a reward

The language-model head runs only where a logprob is wanted, in chunks, so that [T, vocabulary]
logits never exist at once for a large vocabulary:

    forward    hidden, weight -> logits -> scale, cap, temperature -> logprob, entropy    (dropped)
    backward   hidden, weight -> logits again -> their gradient -> hidden.grad, weight.grad

A single chunk keeps its probabilities instead. Logits are float32 whatever the weights are, and the
weight's gradient adds up over the chunks in float32: in 16 bits the last chunks would round away.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from areal.algorithms.packing import Batch
from areal.engines.model.guards import is_scalar
from areal.errors import InvalidInput


class Head(Protocol):
    """Computes a value from the hidden state of each loss token."""

    @property
    def shift(self) -> int:
        """1: uses the token before, which predicts it; 0: uses the token itself."""

    def read(
        self, hf: Any, hidden: Tensor, batch: Batch, targets: Tensor, *, chunk_elements: int
    ) -> tuple[Tensor, Tensor]:
        """Read the head's values from hidden states.

        Args:
            hf: the model; its parameters are whole.
            hidden: [N, dim].
            batch: packed batch.
            targets: int64 [N], positions of the loss tokens in the batch.
            chunk_elements: largest logits tensor.

        Returns:
            The value, [N, ...], with gradient, and a second one, [N, ...], without.

        Raises:
            InvalidInput: the model has no such head.
        """


@dataclass(frozen=True)
class LogprobHead:
    """log p of each token, and the entropy of its distribution: float32, or float64 of float64.

    With `ids` log p of several ids in the place of each token: [N, k] as that key of the batch.
    """

    temperature: float = 1.0
    """Divides the logits; > 0."""
    ids: str = ""
    """Batch key, int64 [T, k]."""
    shift = 1

    def read(
        self, hf: Any, hidden: Tensor, batch: Batch, targets: Tensor, *, chunk_elements: int
    ) -> tuple[Tensor, Tensor]:
        labels = batch[self.ids or "input_ids"][targets]
        return chosen_logprobs(hf, hidden, labels, self.temperature, chunk_elements=chunk_elements)


@dataclass(frozen=True)
class TopLogprobHead:
    """log p of the `k` likeliest ids at each token, largest first, and those ids: [N, k]."""

    k: int
    temperature: float = 1.0
    shift = 1

    @torch.no_grad()
    def read(
        self, hf: Any, hidden: Tensor, batch: Batch, targets: Tensor, *, chunk_elements: int
    ) -> tuple[Tensor, Tensor]:
        weight, bias = _parameters(hf)
        matrix, transform = _matrix(weight), _Transform.of(hf, self.temperature)
        parts = []
        size = max(1, chunk_elements // weight.shape[0])
        for begin in range(0, len(hidden), size):
            rows = hidden[begin : begin + size]
            scores = transform.apply_(_logits(rows, matrix, bias))
            best, ids = scores.topk(self.k, -1)
            parts.append((best - scores.logsumexp(-1, keepdim=True), ids))
        logprobs, ids = map(torch.cat, zip(*parts, strict=True))
        return logprobs, ids


@dataclass(frozen=True)
class ScalarHead:
    """One number for each loss token, float32 (float64) [N]; the second value is zeros."""

    shift: int = 1
    """1: the value of the state before a token; 0: the score of what ends with it."""

    def read(
        self, hf: Any, hidden: Tensor, batch: Batch, targets: Tensor, *, chunk_elements: int
    ) -> tuple[Tensor, Tensor]:
        if not is_scalar(hf):
            raise InvalidInput(
                f"model {type(hf).__name__} has no scalar head: expected scalar=True"
            )
        wide = _wide(hidden)
        numbers = torch.mv(hidden.to(wide), _whole(hf.score.weight)[0].to(wide))
        return numbers, torch.zeros_like(numbers)


def chosen_logprobs(
    hf: Any, hidden: Tensor, labels: Tensor, temperature: float, *, chunk_elements: int
) -> tuple[Tensor, Tensor]:
    """Return the same as `logprobs_of`, from hidden states [N, dim].

    Args:
        hf: transformers causal language model.
        hidden: hidden states of the tokens before the labels.
        labels: int64 [N]; or [N, k], whose logprobs then are [N, k].
        temperature: > 0.
        chunk_elements: largest logits tensor.

    Raises:
        InvalidInput: the head is more than a linear layer.
    """
    weight, bias = _parameters(hf)
    size = max(1, chunk_elements // weight.shape[0])
    fused: Any = _LinearLogprob.apply
    transform = _Transform.of(hf, temperature)
    logprobs, entropies = fused(hidden, weight, bias, labels, transform, size)
    return logprobs, entropies


def _parameters(hf: Any) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of the head, whole; FSDP's hooks have gathered what it shards."""
    head = hf.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise InvalidInput(
            f"model {type(hf).__name__} has a head of type {type(head).__name__}: expected Linear"
        )
    return _whole(head.weight), None if head.bias is None else _whole(head.bias)


def _whole(parameter: Any) -> Any:
    # Tensor parallelism's shard: every rank computes the same loss from all of it.
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter


@dataclass(frozen=True)
class _Transform:
    """What happens to the head's output before softmax."""

    scale: float
    cap: float | None
    temperature: float

    @classmethod
    def of(cls, hf: Any, temperature: float) -> _Transform:
        config = hf.config.get_text_config()
        cap = getattr(config, "final_logit_softcapping", None)
        return cls(_logit_scale(config), cap, temperature)

    def apply_(self, logits: Tensor) -> Tensor:
        """Apply it in place."""
        if self.cap is None:
            factor = self.scale / self.temperature
            return logits if factor == 1.0 else logits.mul_(factor)
        return logits.mul_(self.scale / self.cap).tanh_().mul_(self.cap / self.temperature)

    def slope_(self, gradient: Tensor, transformed: Tensor) -> Tensor:
        """Turn the gradient of transformed logits into that of the head's output, in place."""
        if self.cap is not None:
            tanh = transformed.mul_(self.temperature / self.cap)
            gradient.mul_(tanh.square_().neg_().add_(1.0))
        factor = self.scale / self.temperature
        return gradient if factor == 1.0 else gradient.mul_(factor)


class _LinearLogprob(torch.autograd.Function):
    """log_softmax(transform(hidden @ weight.T + bias)) at labels [N] or [N, k], and its entropy."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        transform: _Transform,
        size: int,
    ) -> tuple[Tensor, Tensor]:
        wide = _wide(hidden)
        trained = any(ctx.needs_input_grad[:3])
        once = trained and len(labels) <= size and transform.cap is None
        logprobs = hidden.new_empty(labels.shape, dtype=wide)
        entropies = hidden.new_empty(len(labels), dtype=wide)
        kept: Tensor | None = None
        matrix = _matrix(weight)
        for begin in range(0, len(labels), size):
            part = slice(begin, begin + size)
            scores = transform.apply_(_logits(hidden[part], matrix, bias))
            scores.sub_(scores.logsumexp(-1, keepdim=True))
            logprobs[part] = scores.gather(1, _columns(labels[part])).view(labels[part].shape)
            likely = scores.exp()
            entropies[part] = scores.mul_(likely).sum(-1).neg_()
            kept = likely if once else None
        ctx.save_for_backward(hidden, weight, bias, labels, kept)
        ctx.transform, ctx.size = transform, size
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _entropy: Tensor) -> tuple[Any, ...]:
        hidden, weight, bias, labels, kept = ctx.saved_tensors
        of_hidden, of_weight, of_bias = ctx.needs_input_grad[:3]
        wide = _wide(hidden)
        hidden_grad = torch.empty_like(hidden) if of_hidden else None
        weight_grad = torch.zeros_like(weight, dtype=wide) if of_weight else None
        bias_grad = torch.zeros_like(bias, dtype=wide) if of_bias else None
        matrix = _matrix(weight)
        for begin in range(0, len(labels), ctx.size):
            part = slice(begin, begin + ctx.size)
            rows, chosen, above = hidden[part], _columns(labels[part]), _columns(grad[part])
            total = -above.sum(-1, keepdim=True)
            if kept is not None:
                change, scores = kept * total, kept
            else:
                scores = ctx.transform.apply_(_logits(rows, matrix, bias))
                change = scores.softmax(-1).mul_(total)
            change.scatter_add_(1, chosen, above)
            change = ctx.transform.slope_(change, scores)
            if bias_grad is not None:
                bias_grad.add_(change.sum(0))
            narrow = change.to(matrix.dtype)
            if hidden_grad is not None:
                hidden_grad[part] = narrow @ matrix
            if weight_grad is not None:
                _add_product_(weight_grad, narrow, rows)
        return (
            hidden_grad,
            None if weight_grad is None else weight_grad.to(weight.dtype),
            None if bias_grad is None else bias_grad.to(bias.dtype),
            None,
            None,
            None,
        )


def _columns(tensor: Tensor) -> Tensor:
    """[N] or [N, k] -> [N, k]."""
    return tensor if tensor.ndim == 2 else tensor[:, None]


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _matrix(weight: Tensor) -> Tensor:
    """The weight as it is multiplied: tensor cores add 16-bit products in 32 bits, CPUs do not."""
    return weight if weight.is_cuda else weight.to(_wide(weight))


def _logits(rows: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    """[n, dim] -> [n, vocabulary], float32 (float64)."""
    wide = _wide(rows)
    if rows.dtype == wide or not rows.is_cuda:
        return nn.functional.linear(rows.to(wide), matrix, None if bias is None else bias.to(wide))
    logits: Tensor = torch.mm(rows, matrix.T, out_dtype=wide)
    return logits if bias is None else logits.add_(bias)


def _add_product_(total: Tensor, change: Tensor, rows: Tensor) -> None:
    """Add change.T @ rows to a float32 (float64) total."""
    if total.dtype == rows.dtype or not rows.is_cuda:
        total.addmm_(change.T, rows.to(total.dtype))
    else:
        total.add_(torch.mm(change.T, rows, out_dtype=total.dtype))


def _logit_scale(config: Any) -> float:
    """Return the factor that the architecture puts on its logits."""
    scale = float(getattr(config, "logit_scale", None) or 1.0)  # Cohere
    scaling = float(getattr(config, "logits_scaling", None) or 1.0)
    # Granite divides by it, HyperCLOVA X multiplies.
    return scale * (scaling if config.model_type == "hyperclovax" else 1.0 / scaling)


def logprobs_of(logits: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return log_softmax(logits / temperature) at the labels, and the entropies without gradient.

    The plain formula: what the self-test compares the head with.

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
