"""Heads compute values from hidden states. An algorithm is a head, a loss, and keys of a batch.

    LogprobHead      logprobs of tokens, or of given ids each, and entropies      a policy
    TopLogprobHead   the k likeliest ids of each token and their logprobs         a teacher
    ScalarHead       one number: a state's value, a response's score              a critic, a reward

The language-model head runs only where a logprob is wanted, in chunks, so that [T, vocabulary]
float32 logits never exist at once for a large vocabulary. Its passes over such tensors are what it
costs on a GPU, so there are few of them:

    forward    hidden, weight -> logits -> scale, cap, temperature -> log_softmax (in chunks)
               -> logprob, entropy, probabilities in the weight's precision (kept, all rows)
    backward   probabilities -> the logits' gradient -> hidden.grad, weight.grad (one product each)

Probabilities are kept if they take no more than a few float32 chunks. Otherwise the backward pass
computes each chunk's logits again. Logits are float32 whatever the weights are, and the weight's
gradient adds up in float32 inside one product, or over the chunks: in 16 bits the last chunks would
round away.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from areal.errors import InvalidInput
from areal_torch.algorithms.packing import Batch
from areal_torch.engines.model.guards import is_scalar

_KEPT_BYTES = 8
"""For each element of a chunk, this many bytes of probabilities are kept for the backward pass."""


class Head(Protocol):
    """Computes a value from the hidden state of each loss token."""

    @property
    def shift(self) -> int:
        """1: uses the token before, which predicts it; 0: uses the token itself."""

    def read(
        self, hf: Any, hidden: Tensor, batch: Batch, targets: Tensor, *, chunk_elements: int
    ) -> tuple[Tensor, Tensor]:
        """Reads the head's values from hidden states.

        Args:
            hf: The model; its parameters are whole.
            hidden: [N, dim].
            batch: Packed batch.
            targets: int64 [N], positions of the loss tokens in the batch.
            chunk_elements: Largest logits tensor.

        Returns:
            The value, [N, ...], with gradient, and a second one, [N, ...], without.

        Raises:
            InvalidInput: The model has no such head.
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
    """1: a token's value is that of the state before it; 0: its score is that of the text that ends
    with it."""

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
    """Returns the same as `logprobs_of`, from hidden states [N, dim].

    Args:
        hf: transformers causal language model.
        hidden: Hidden states of the tokens before the labels.
        labels: int64 [N]; or [N, k], whose logprobs then are [N, k].
        temperature: > 0.
        chunk_elements: Largest logits tensor.

    Raises:
        InvalidInput: The head is more than a linear layer.
    """
    weight, bias = _parameters(hf)
    size = max(1, chunk_elements // weight.shape[0])
    fused: Any = _LinearLogprob.apply
    transform = _Transform.of(hf, temperature)
    logprobs, entropies = fused(hidden, weight, bias, labels, transform, size)
    return logprobs, entropies


def logits_of(hf: Any, hidden: Tensor, matrix: Tensor | None = None) -> Tensor:
    """Returns the logits that logprobs are made of, float32 (float64) [N, vocabulary].

    Args:
        hf: transformers causal language model.
        hidden: [N, dim].
        matrix: From `wide_matrix`, if the head is to be used often; None: made here.

    Raises:
        InvalidInput: The head is more than a linear layer.
    """
    matrix = wide_matrix(hf) if matrix is None else matrix
    return _Transform.of(hf, 1.0).apply_(_logits(hidden, matrix, _parameters(hf)[1]))


def wide_matrix(hf: Any) -> Tensor:
    """Returns the head's weight as it is multiplied; raises InvalidInput as `logits_of` does."""
    return _matrix(_parameters(hf)[0])


def _parameters(hf: Any) -> tuple[Tensor, Tensor | None]:
    """Returns the head's whole weight and bias; FSDP's hooks have gathered what it shards."""
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
        """Applies it in place."""
        if self.cap is None:
            return logits if self.factor == 1.0 else logits.mul_(self.factor)
        return logits.mul_(self.scale / self.cap).tanh_().mul_(self.cap / self.temperature)

    @property
    def factor(self) -> float:
        """Returns the factor of a gradient of transformed logits, without a cap."""
        return self.scale / self.temperature

    def slope_(self, transformed: Tensor) -> Tensor:
        """Turns transformed logits into what a cap adds to that factor, in place."""
        assert self.cap is not None
        return transformed.mul_(self.temperature / self.cap).square_().neg_().add_(1.0)


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
        wide, matrix, count = _wide(hidden), _matrix(weight), len(labels)
        # A cap's slope needs the logits, so they are computed again.
        keeps = any(ctx.needs_input_grad[:3]) and transform.cap is None
        keeps = keeps and count * matrix.itemsize <= size * _KEPT_BYTES
        logprobs = hidden.new_empty(labels.shape, dtype=wide)
        entropies = hidden.new_empty(count, dtype=wide)
        likely = matrix.new_empty(count if keeps else min(size, count), len(matrix))
        for begin in range(0, count, size):
            part = slice(begin, begin + size)
            scores = transform.apply_(_logits(hidden[part], matrix, bias)).log_softmax(-1)
            logprobs[part] = scores.gather(1, _columns(labels[part])).view(labels[part].shape)
            here = likely[part] if keeps else likely[: len(scores)]
            torch.exp(scores, out=here)
            entropies[part] = scores.mul_(here).sum(-1).neg_()
        ctx.save_for_backward(hidden, weight, bias, labels, logprobs, likely if keeps else None)
        ctx.transform, ctx.size = transform, size
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _entropy: Tensor) -> tuple[Any, ...]:
        hidden, weight, bias, labels, logprobs, kept = ctx.saved_tensors
        of_hidden, of_weight, of_bias = ctx.needs_input_grad[:3]
        wide, matrix, transform = _wide(hidden), _matrix(weight), ctx.transform
        size = max(len(labels), 1) if kept is not None else ctx.size
        starts = range(0, len(labels), size)
        hidden_grad = torch.empty_like(hidden) if of_hidden else None
        # A single product adds up in float32 before it rounds.
        summed = matrix.dtype if len(starts) == 1 else wide
        weight_grad: Tensor | None = None
        bias_grad = torch.zeros_like(bias, dtype=wide) if of_bias else None
        for begin in starts:
            part = slice(begin, begin + size)
            rows, chosen = hidden[part], _columns(labels[part])
            above = _columns(grad[part]) * transform.factor
            total = -above.sum(-1, keepdim=True)
            scores = None if kept is not None else _logits(rows, matrix, bias)
            if scores is None:
                likely, change = kept, torch.empty_like(kept)
            else:
                likely = transform.apply_(scores).softmax(-1)
                narrow = likely.dtype != matrix.dtype
                change = matrix.new_empty(likely.shape) if narrow else likely
            torch.mul(likely, total, out=change)
            # From float32: where a token is nearly certain, rounding comes after the difference.
            exact = _columns(logprobs[part]).exp() * total + _of_equal_ids(above, chosen)
            change.scatter_(1, chosen, exact.to(change.dtype))
            if transform.cap is not None:
                assert scores is not None
                change.mul_(transform.slope_(scores))
            if bias_grad is not None:
                bias_grad.add_(change.sum(0, dtype=wide))
            if hidden_grad is not None:
                hidden_grad[part] = change @ matrix
            if of_weight:
                weight_grad = _add_product(weight_grad, change, rows, summed)
        if of_weight and weight_grad is None:
            weight_grad = torch.zeros_like(weight)
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


def _add_product(total: Tensor | None, change: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns total + change.T @ rows as `dtype`; the total is changed in place."""
    if not change.is_cuda:
        rows = rows.to(change.dtype)
    if dtype == change.dtype:
        return torch.mm(change.T, rows) if total is None else total.addmm_(change.T, rows)
    # addmm would add in the same pass, but some releases refuse a total wider than the factors.
    product: Tensor = torch.mm(change.T, rows, out_dtype=dtype)
    return product if total is None else total.add_(product)


def _of_equal_ids(above: Tensor, ids: Tensor) -> Tensor:
    """Adds to each value, [N, k], those of other columns with the same id."""
    if ids.shape[1] == 1:
        return above
    equal = ids[:, :, None] == ids[:, None, :]
    return torch.where(equal, above[:, None, :], 0.0).sum(-1)


def _logit_scale(config: Any) -> float:
    """Returns the factor that the architecture puts on its logits."""
    scale = float(getattr(config, "logit_scale", None) or 1.0)  # Cohere
    scaling = float(getattr(config, "logits_scaling", None) or 1.0)
    # Granite divides by it, HyperCLOVA X multiplies.
    return scale * (scaling if config.model_type == "hyperclovax" else 1.0 / scaling)


def logprobs_of(logits: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Returns log_softmax(logits / temperature) at the labels, and the entropies without gradient.

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
