"""Runs the model for the scheduler: padded prefill, decode steps, the KV cache's size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from areal_inference.decode.request import Request
from areal_inference.decode.sampling import SamplingBatch, sample
from areal_inference.model.adapters import Adapter, Pairs
from areal_inference.model.kv_cache import round_up
from areal_inference.model.vision import Seen

_LOGITS_ROWS = 256
"""Prompt positions whose logits exist at once: bounds the memory of input logprobs."""


class Cache(Protocol):
    """What decoders remember of running requests (`kv_cache`, `plain_cache`)."""

    @property
    def length(self) -> int:
        """Positions of a row."""

    def reserve(self, rows: int, length: int, budget: int) -> None:
        """Makes room for rows of a length."""

    def share(self, source: int, targets: list[int], length: int) -> None:
        """Copies the head of one row to others."""

    def move(self, sources: list[int], targets: list[int], length: int) -> None:
        """Copies rows to other rows."""

    def clear(self, row: int) -> None:
        """Overwrites a row with zeros."""

    def reset(self) -> None:
        """Releases the cache's memory."""


class Decoder(Protocol):
    """A model whose weights can be replaced between two calls (`transformer`, `plain`)."""

    weights: Any
    """A `WeightSet` of the runner's own kind."""
    adapters: Sequence[Adapter | None]
    """Adapters of the sequences of the next call, in its order; empty: no sequence has one."""

    def adapt(self, pairs: Pairs) -> Any:
        """Returns an adapter's parts as it computes with them; raises InvalidInput."""

    def prefill(
        self,
        cache: Any,
        rows: list[int],
        sequences: Sequence[list[int]],
        seen: Sequence[Seen | None],
    ) -> Any:
        """See `transformer.Model.prefill`."""

    def decode(
        self, cache: Any, tokens: Tensor, positions: Tensor, span: int, shifts: Tensor | None
    ) -> Tensor:
        """See `transformer.Model.decode`."""

    def logits(self, hidden: Tensor) -> Tensor:
        """See `transformer.Model.logits`."""

    def routes(self, cache: Any, row: int) -> Sequence[npt.NDArray[np.int32]]:
        """Returns the experts of each token that a row has, [layers, k]; empty: there are none."""


class ModelRunner:
    """`scheduler.Runner` on a real model.

    Args:
        model: The decoder.
        cache: Its KV cache.
        max_total_tokens: Most rows x row length the cache may grow to.
        max_prefill_tokens: Most tokens (padding included) of one prefill call.
        seed: Seed of the sampler; None: from the operating system.
    """

    def __init__(
        self,
        model: Decoder,
        cache: Cache,
        *,
        max_total_tokens: int,
        max_prefill_tokens: int,
        seed: int | None,
    ):
        self.model = model
        self.cache = cache
        self.max_total_tokens = max_total_tokens
        self._max_prefill_tokens = max_prefill_tokens
        self._generator = torch.Generator()
        if seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(seed)
        self._sampling = SamplingBatch([])

    def fits(self, rows: int, length: int) -> bool:
        """A single row always fits: a request longer than the cache was refused on arrival."""
        return rows == 1 or rows * round_up(length) <= self.max_total_tokens

    def reserve(self, rows: int, length: int) -> None:
        """See `KVCache.reserve`."""
        self.cache.reserve(rows, length, self.max_total_tokens)

    def share(self, source: int, targets: list[int], length: int) -> None:
        """See `KVCache.share`."""
        self.cache.share(source, targets, length)

    def move(self, sources: list[int], targets: list[int], length: int) -> None:
        """See `KVCache.move`."""
        self.cache.move(sources, targets, length)

    def clear(self, row: int) -> None:
        """See `KVCache.clear`."""
        self.cache.clear(row)

    def load(self, weights: Any) -> None:
        """Uses other weights from the next call on."""
        self.model.weights = weights

    def unload(self) -> None:
        """Releases the memory of the weights, which nothing reads until `load`."""
        self.load(self.model.weights.emptied())

    def reset(self) -> None:
        """Releases the cache's memory."""
        self.cache.reset()

    def prefill(self, requests: Sequence[Request]) -> None:
        """Fills each request's row from its prompt and output so far, without the last token."""
        for group in _similar_lengths(requests, self._max_prefill_tokens):
            sequences = [(r.input_ids + r.output_ids)[:-1] for r in group]
            hidden = None
            self.model.adapters = [r.adapter for r in group]
            if any(sequences):
                hidden = self.model.prefill(
                    self.cache, [r.row for r in group], sequences, [r.seen for r in group]
                )
            for index, request in enumerate(group):
                if request.logprob_start >= 0 and request.input_logprobs is None:
                    row = hidden[index] if hidden is not None else None
                    self._read_prompt(request, row)

    def _read_prompt(self, request: Request, hidden: torch.Tensor | None) -> None:
        """Computes logprobs of the prompt after logprob_start, a slice of logits at a time."""
        targets = torch.tensor(request.input_ids[request.logprob_start + 1 :], dtype=torch.int64)
        found: list[float] = []
        top: list[list[tuple[float, int]]] = []
        if hidden is not None and len(targets):
            at = hidden[request.logprob_start : request.logprob_start + len(targets)]
            parts = zip(
                torch.split(at, _LOGITS_ROWS), torch.split(targets, _LOGITS_ROWS), strict=True
            )
            for part, ids in parts:
                logprobs = torch.log_softmax(self.model.logits(part), dim=-1)
                found += logprobs.gather(1, ids.unsqueeze(1)).squeeze(1).tolist()
                if request.top_logprobs:
                    best, likeliest = logprobs.topk(request.top_logprobs, dim=-1)
                    pairs = zip(best.tolist(), likeliest.tolist(), strict=True)
                    top += [list(zip(*pair, strict=True)) for pair in pairs]
        request.input_logprobs = found
        request.input_top_logprobs = top if request.top_logprobs else None

    def decode(
        self, requests: Sequence[Request], *, changed: bool
    ) -> tuple[list[int], list[float]]:
        """Returns each request's next token and its logprob (request i is in row i)."""
        if changed:
            self._sampling = SamplingBatch([r.params for r in requests])
        last = [r.output_ids[-1] if r.output_ids else r.input_ids[-1] for r in requests]
        positions = [r.length - 1 for r in requests]
        span = min(round_up(max(positions) + 1), self.cache.length)
        shifts = None
        if any(r.seen is not None for r in requests):
            shifts = torch.tensor([0 if r.seen is None else r.seen.shift for r in requests])
        self.model.adapters = [r.adapter for r in requests]
        logits = self.model.decode(
            self.cache, torch.tensor(last), torch.tensor(positions), span, shifts
        )
        for row, request in enumerate(requests):
            if request.grammar is not None:
                logits[row, torch.from_numpy(~request.grammar.allowed())] = -torch.inf
            if request.routed_from is not None:
                known = len(request.routes)
                request.routes += self.model.routes(self.cache, row)[known:]
        generated = [len(r.output_ids) for r in requests]
        drawn, logprobs = sample(logits, self._sampling, generated, self._generator)
        tokens = drawn.tolist()
        for request, token in zip(requests, tokens, strict=True):
            if request.grammar is not None:
                request.grammar.accept(token)
        return tokens, logprobs.tolist()


def _similar_lengths(requests: Sequence[Request], max_tokens: int) -> Iterator[list[Request]]:
    """Groups for one padded call each: bounded in size, at most half padding."""
    group: list[Request] = []
    for request in sorted(requests, key=lambda r: r.length, reverse=True):
        if group and (
            2 * request.length < group[0].length or (len(group) + 1) * group[0].length > max_tokens
        ):
            yield group
            group = []
        group.append(request)
    if group:
        yield group
