"""One generation request and how to sample it. No torch, no HTTP: shared by both sides."""

from __future__ import annotations

import asyncio
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from areal_inference.decode.grammar import Grammar
    from areal_inference.model.adapters import Adapter
    from areal_inference.model.vision import Seen

_GREEDY_BELOW = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to sample one request. Names are SGLang's where it has them."""

    max_new_tokens: int
    min_new_tokens: int = 0
    """Stop tokens cannot be drawn before this many tokens."""
    temperature: float = 1.0
    """Below 1e-6: greedy."""
    top_p: float = 1.0
    top_k: int = -1
    """-1: all."""
    stop_ids: frozenset[int] = frozenset()
    """Stop tokens of the request and end-of-sequence tokens of the model; empty if ignore_eos."""
    seed: int | None = None
    """Makes the draws depend on (seed, index of the token) only."""
    skip_special_tokens: bool = True
    stream_interval: int = 1
    """Tokens from one event of a stream to the next; the first token is sent at once."""

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.temperature < _GREEDY_BELOW


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """One sequence being generated.

    The engine thread writes it until `finish` is set; the HTTP side reads it after `woken`.
    `logprobs` is appended last, so its length is a consistent length of all output lists.
    """

    rid: str
    input_ids: list[int]
    params: SamplingParams
    extra_key: str | None = None
    """Requests share prompt work only if this is equal too (it carries the policy version)."""
    logprob_start: int = -1
    """First prompt position whose logprob is wanted; -1: none."""
    top_logprobs: int = 0
    """How many of the likeliest ids are returned for each prompt token after `logprob_start`."""
    stream: bool = False
    """Wake the HTTP side every `stream_interval` tokens, not only at the end."""
    received_at: float = 0.0
    """Unix seconds."""
    grammar: Grammar | None = None
    """What may be sampled; None: everything."""
    seen: Seen | None = None
    """The images of the prompt; `input_ids` has one token for each of their features."""
    routed_from: int | None = None
    """First token whose experts are returned; None: no token's."""

    adapter: Adapter | None = None
    """The adapter that computes the request to its end, even if it is unloaded meanwhile; None:
    only the weights."""

    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    input_logprobs: list[float] | None = None
    """logprob of input_ids[logprob_start + 1 :]."""
    input_top_logprobs: list[list[tuple[float, int]]] | None = None
    """For the same positions, the `top_logprobs` likeliest ids as (logprob, id), in descending
    order."""
    routes: list[npt.NDArray[np.int32]] = field(default_factory=list)
    """The experts of each token but the last, [layers, k], if `routed_from` is set and the model
    has experts."""
    spans: list[tuple[str, int]] = field(default_factory=list)
    """(weight version, index of the first output token it sampled), in order."""
    weight_version: str = ""
    """Version that sampled the latest token; once finished, the version at that moment."""
    finish: dict[str, Any] | None = None
    """SGLang's finish_reason, once finished."""
    row: int = -1
    """Row of the KV cache while running."""
    num_retractions: int = 0
    cached_tokens: int = 0
    """Prompt tokens whose keys and values were copied from another request."""
    started_at: float = 0.0
    first_token_at: float = 0.0
    finished_at: float = 0.0
    woken: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def length(self) -> int:
        """Returns the number of known tokens; the last one is not in the KV cache yet."""
        return len(self.input_ids) + len(self.output_ids)

    def prompt_key(self) -> tuple[str | None, str, bytes]:
        """A key that is equal for requests that may share the work on their prompt."""
        images = b"" if self.seen is None else self.seen.digest
        adapter = "" if self.adapter is None else self.adapter.uid
        return self.extra_key, adapter, images + array("q", self.input_ids).tobytes()


def abort_reason(message: str) -> dict[str, Any]:
    """Returns SGLang's finish_reason of an interrupted request."""
    return {"type": "abort", "message": message, "status_code": None, "err_type": None}
