"""The module that is sharded and trained: maps packed tokens to the values of a head.

Decoder and head run inside one `forward`, because FSDP gathers the root's parameters (the embedding
and the head) around that call.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from areal.errors import InvalidInput
from areal.tokenizer import longest_input
from areal_torch.algorithms.packing import Batch
from areal_torch.engines.model import guards, vision
from areal_torch.engines.model.attention.dispatch import PACKED
from areal_torch.engines.model.attention.layout import PackedLayout, build_layout
from areal_torch.engines.model.attention.ulysses import Context
from areal_torch.engines.model.heads import Head
from areal_torch.engines.model.layer_types import chunk_sizes
from areal_torch.engines.model.positions import count_in_sequences
from areal_torch.engines.model.recurrent import RecurrentLayers
from areal_torch.engines.model.routes import Routes


class PackedCausalLM(nn.Module):
    """A Hugging Face causal language model that maps a packed batch to the values of a head."""

    def __init__(
        self,
        hf: Any,
        *,
        kernel: str,
        chunk_elements: int,
        boundaries: Mapping[type, str] | None = None,
        replays: bool = True,
    ) -> None:
        """Wraps `hf`.

        Args:
            hf: transformers causal language model.
            kernel: The attention kernel, from `dispatch.choose`.
            chunk_elements: Largest logits tensor.
            boundaries: From `recurrent.choose`; None: no layer's kernels heed them.
            replays: Take the experts that a batch's routes name; false: routers always choose.

        Raises:
            InvalidInput: The architecture cannot be computed on packed sequences.
        """
        super().__init__()
        self.hf = hf
        self.kernel = kernel
        self.chunk_elements = chunk_elements
        self.context: Context | None = None
        """Ranks that share a micro-batch's tokens; set before the first forward pass."""
        guards.refuse_unsupported(hf)
        self.rope_limit = guards.rope_limit(hf.config)
        text = hf.config.get_text_config()
        self.longest = longest_input(text.to_dict())
        """Most tokens of a sequence; None: any number."""
        self.vocab_size: int | None = getattr(text, "vocab_size", None)
        guards.set_attention(hf, kernel)
        guards.freeze_towers(hf)
        count_in_sequences(guards.decoder_of(hf))
        self.recurrent = RecurrentLayers(hf, guards.decoder_of(hf), boundaries or {})
        self.routes = Routes(hf, guards.decoder_of(hf))
        self.routes.off = not replays
        self._placeholders = torch.tensor(guards.placeholders(hf.config), dtype=torch.int64)

    def check_images(self, batch: Batch, ranks_per_share: int) -> None:
        """Refuses images that this model or layout would compute wrong; see `vision.check`."""
        vision.check(self.hf, batch, ranks_per_share, self._placeholders)

    def check_tokens(self, batch: Batch) -> None:
        """Refuses sequences that are longer than the model, and ids beyond its embedding.

        Raises:
            InvalidInput: Names the sequence, from 0.
        """
        lengths = batch["cu_seqlens"].diff()
        if self.longest is not None and lengths.numel() and int(lengths.max()) > self.longest:
            raise InvalidInput(
                f"sequence {int(lengths.argmax())} of the batch: {int(lengths.max())} tokens, "
                f"expected at most {self.longest} (the model's max_position_embeddings)"
            )
        ids = batch["input_ids"]
        if self.vocab_size is None or not ids.numel() or int(ids.max()) < self.vocab_size:
            return
        where = torch.searchsorted(batch["cu_seqlens"], int(ids.argmax()), right=True)
        raise InvalidInput(
            f"sequence {int(where) - 1} of the batch: token id {int(ids.max())}, expected less "
            f"than {self.vocab_size} (the model's vocab_size)"
        )

    def plan(self, batch: Batch, *, share_prefixes: bool, least: float = 0.0) -> PackedLayout:
        """Plans a micro-batch's computation, with what this model's kernels read."""
        buckets = self.kernel == PACKED or self.recurrent.by_length
        chunk = next(iter(chunk_sizes(self.hf.config.get_text_config())), None)
        return build_layout(
            batch, share_prefixes=share_prefixes, buckets=buckets, least=least, chunk=chunk
        )

    def own_targets(self, layout: PackedLayout, targets: Tensor, head: Head) -> Tensor | None:
        """Returns which targets are read off this rank's tokens, and one more: never none.

        How many there are is known where the layout is planned, in host memory. None: this rank
        has all tokens.
        """
        if self.context is None:
            return None
        rows = _rows(layout, targets, head)
        first, count = self.context.own(len(layout.computed))
        own = torch.nonzero((rows >= first) & (rows < first + count)).flatten()
        return torch.cat([own, own.new_zeros(1)])

    def forward(
        self,
        batch: Batch,
        layout: PackedLayout,
        targets: Tensor,
        head: Head,
        seen: vision.Seen | None = None,
        own: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Computes what a head reads.

        Args:
            batch: Packed batch on the model's device.
            layout: From `build_layout(batch)`.
            targets: int64 [N], batch positions to read at; with a shift none is a sequence's first.
                Position 0 means "no target"; ignore the value returned for it.
            head: With a shift it reads at the token before the target.
            seen: The batch's images; None for text.
            own: From `own_targets`, moved; None: found here, for which the host waits if ranks
                share a micro-batch's tokens.

        Returns:
            What `head.read` does, with N the targets.
        """
        self._check_lengths(layout.longest)
        attention: dict[str, Any] = {"packed_layout": layout}
        computed, positions = layout.computed, layout.position_ids
        if self.context is not None:
            attention |= {"context": self.context, "tokens": len(computed)}
            computed, positions = self.context.cut(computed), self.context.cut(positions)
        input_ids, routes = batch["input_ids"][computed], self.routes.of(batch)
        inputs: dict[str, Any] = {"input_ids": input_ids[None], "position_ids": positions[None]}
        if seen is not None:
            inputs, nothing = vision.embed(self.hf, input_ids, seen)
            inputs["position_ids"] = seen.position_ids[:, None]
        given = None if routes is None else routes[computed]
        with self.recurrent.told(layout), self.routes.told(given):
            output = guards.decoder_of(self.hf)(
                **inputs, attention_mask=None, use_cache=False, **attention
            )
        rows = _rows(layout, targets, head)
        hidden = output.last_hidden_state[0]
        if seen is not None:
            hidden = hidden + nothing
        if self.context is None:
            return self._read_off(hidden, rows, batch, targets, head)
        found = self.own_targets(layout, targets, head) if own is None else own
        assert found is not None
        first, count = self.context.own(len(layout.computed))
        here = (rows[found] - first).clamp(0, count - 1)
        read, beside = self._read_off(hidden, here, batch, targets[found], head)
        whole = (self.context.sum_parts(_spread(part, found, len(rows))) for part in (read, beside))
        read, beside = whole
        return read, beside.detach()

    def _read_off(
        self, hidden: Tensor, rows: Tensor, batch: Batch, targets: Tensor, head: Head
    ) -> tuple[Tensor, Tensor]:
        chosen = hidden.index_select(0, rows)
        return head.read(self.hf, chosen, batch, targets, chunk_elements=self.chunk_elements)

    def _check_lengths(self, longest: int) -> None:
        if self.rope_limit is not None and longest > self.rope_limit:
            raise InvalidInput(
                f"a sequence of {longest} tokens: beyond {self.rope_limit} this model's rope "
                "changes for all sequences of a micro-batch; expected prompt and response within "
                f"{self.rope_limit} tokens (gconfig.max_new_tokens), or a model with yarn rope"
            )


def _rows(layout: PackedLayout, targets: Tensor, head: Head) -> Tensor:
    """Returns the computed token that each target is read off."""
    # The distribution of token t is read off token t - 1: the only shift in the code base.
    return layout.locate[(targets - head.shift).clamp(min=0)]


def _spread(part: Tensor, found: Tensor, total: int) -> Tensor:
    """Puts a rank's rows in their places among all; the last counts nothing.

    It lets a rank without any take part in the backward pass.
    """
    weight = part.new_ones(len(part), *[1] * (part.ndim - 1))
    weight[-1] = 0
    return part.new_zeros(total, *part.shape[1:]).index_add(0, found, part * weight)
