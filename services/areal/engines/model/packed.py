"""The module that is sharded and trained: a causal language model from packed tokens to logprobs.

Decoder and head run inside one `forward`, because FSDP gathers the root's parameters (the embedding
and the head) around that call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from areal.algorithms.packing import Batch
from areal.engines.model import guards, heads
from areal.engines.model.attention.layout import PackedLayout
from areal.engines.model.attention.ulysses import Context
from areal.errors import InvalidInput


class PackedCausalLM(nn.Module):
    """A Hugging Face causal language model that maps a packed batch to logprobs."""

    def __init__(self, hf: Any, *, kernel: str, chunk_elements: int) -> None:
        """Wrap `hf`.

        Args:
            hf: transformers causal language model.
            kernel: computes its attention from now on; from `dispatch.choose`.
            chunk_elements: largest logits tensor.

        Raises:
            InvalidInput: the architecture cannot be computed on packed sequences.
        """
        super().__init__()
        self.hf = hf
        self.kernel = kernel
        self.chunk_elements = chunk_elements
        self.context: Context | None = None
        """Ranks among which a micro-batch's tokens are spread; set before the first forward."""
        guards.refuse_unsupported(hf)
        self.rope_limit = guards.rope_limit(hf.config)
        guards.set_attention(hf, kernel)

    def forward(
        self, batch: Batch, layout: PackedLayout, targets: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Compute logprobs and entropies.

        Args:
            batch: packed batch on the model's device.
            layout: from `build_layout(batch)`.
            targets: int64 [N], batch positions whose logprob is wanted; none is a sequence's first.
                Position 0 stands for "none": what is returned for it means nothing.
            temperature: divides the logits.

        Returns:
            log p(token | tokens before it) [N] with gradient, and the entropy of that distribution
            [N] without; float32, or float64 from a float64 model.
        """
        self._check_lengths(layout.longest)
        attention: dict[str, Any] = {"packed_layout": layout}
        input_ids, positions = batch["input_ids"][layout.computed], layout.position_ids
        if self.context is not None:
            attention |= {"context": self.context, "tokens": len(input_ids)}
            input_ids, positions = self.context.cut(input_ids), self.context.cut(positions)
        output = guards.decoder_of(self.hf)(
            input_ids=input_ids[None],
            position_ids=positions[None],
            attention_mask=None,
            use_cache=False,
            **attention,
        )
        # The distribution of token t is read off token t - 1: the only shift in the code base.
        rows = layout.locate[(targets - 1).clamp(min=0)]
        labels = batch["input_ids"][targets]
        hidden = output.last_hidden_state[0]
        if self.context is None:
            return self._read_off(hidden, rows, labels, temperature)
        first, count = self.context.own(len(layout.computed))
        own = torch.nonzero((rows >= first) & (rows < first + count)).flatten()
        found = torch.cat([own, own.new_zeros(1)])  # one more than there are: never none
        here = (rows[found] - first).clamp(0, count - 1)
        logprobs, entropies = self._read_off(hidden, here, labels[found], temperature)
        # The one more counts nothing, and lets a rank without any take part in the backward pass.
        weight = torch.ones_like(logprobs)
        weight[-1] = 0
        parts = torch.stack([logprobs * weight, entropies * weight])
        whole = parts.new_zeros(2, len(rows)).index_add(1, found, parts)
        logprobs, entropies = self.context.sum_parts(whole).unbind()
        return logprobs, entropies.detach()

    def _read_off(
        self, hidden: Tensor, rows: Tensor, labels: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        return heads.chosen_logprobs(
            self.hf,
            hidden.index_select(0, rows),
            labels,
            temperature,
            chunk_elements=self.chunk_elements,
        )

    def _check_lengths(self, longest: int) -> None:
        if self.rope_limit is not None and longest > self.rope_limit:
            raise InvalidInput(
                f"a sequence of {longest} tokens: beyond {self.rope_limit} this model's rope "
                "changes for all sequences of a micro-batch; expected prompt and response within "
                f"{self.rope_limit} tokens (gconfig.max_new_tokens), or a model with yarn rope"
            )
