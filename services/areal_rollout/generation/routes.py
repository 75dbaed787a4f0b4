"""The experts that a server chose (`return_routed_experts`), read from its answers.

SGLang returns int32 [tokens - 1 - start, layers, k] in base64: of each token of prompt and answer
from `routed_experts_start_len` on, but the last, which no forward pass has read. It does so once an
answer has ended or was aborted, and for all layers: those without experts have zeros. A prompt's
tokens that came from its prefix cache have the experts of the request that computed them. A token's
experts in a layer are kept in ascending order.

Routes are a help, not a part of an answer: whatever is wrong with them, the answer is as good
without. Then the trainer's router chooses, and counts it (`routes/missing`).
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from areal.chassis.logging import get_logger
from areal.model_directory import RouteShape
from areal.types import LLMRequest, LLMResponse

MAX_CALL_BYTES = 256 * 1024 * 1024
"""Routes are requested if those of the longest answers to a call take at most this many bytes."""
_WIDE = np.dtype("<i4")
_PART = 1 << 20
"""Characters of base64 that are read at once; a multiple of 4."""


@dataclass(frozen=True)
class Routing:
    """What a call asks for."""

    reader: RouteReader
    start: int
    """The first token whose routes it wants."""

    @property
    def fields(self) -> dict[str, Any]:
        """Returns the fields of the request's body."""
        return {"return_routed_experts": True, "routed_experts_start_len": self.start}

    def add(self, response: LLMResponse, answer: Any) -> None:
        """See `RouteReader.add`."""
        self.reader.add(response, answer, self.start)


class RouteReader:
    """Asks for routes, and adds those of answers to responses; never raises."""

    def __init__(self, shape: RouteShape) -> None:
        """`shape` is that of the model on the servers."""
        self._shape = shape
        self._log = get_logger(__name__)
        self._said: set[str] = set()

    def ask(
        self, request: LLMRequest, responses: Sequence[LLMResponse], most: int
    ) -> Routing | None:
        """Returns what to ask for in a call; None: nothing.

        Args:
            request: What is generated.
            responses: Answers so far.
            most: Tokens of one whole answer.
        """
        if request.images:
            return None  # a server has more tokens for an image than the prompt
        known = [0 if r.routed_experts is None else len(r.routed_experts) for r in responses]
        start = min(known)
        tokens = len(request.input_ids) + most - start
        shape = self._shape
        size = tokens * shape.layers * shape.chosen * _WIDE.itemsize * 4 // 3 * len(responses)
        if size > MAX_CALL_BYTES:
            self._warn(
                "too_long",
                f"routes of {len(responses)} answers of up to {tokens} tokens would take "
                f"{size >> 20} MiB, more than {MAX_CALL_BYTES >> 20}; expected a smaller "
                "gconfig.n_samples or gconfig.max_new_tokens",
            )
            return None
        return Routing(self, start)

    def add(self, response: LLMResponse, answer: Any, start: int) -> None:
        """Adds what an answer says to a response that has its tokens already.

        Args:
            response: Gets the routes that continue its own.
            answer: One that was found to be valid, but for its routes.
            start: The first token whose routes were asked for.
        """
        value = answer["meta_info"].get("routed_experts")
        if value is None:
            return
        known = response.routed_experts
        count = 0 if known is None else len(known)
        tokens = len(response.input_tokens) + len(response.output_tokens)
        found = self._decoded(value, tokens - 1 - start)
        if isinstance(found, str):
            self._warn("malformed", f"routed_experts {found}")
        elif len(found) > count - start >= 0:
            more = found[count - start :]
            response.routed_experts = more if known is None else np.concatenate([known, more])

    def _decoded(self, value: Any, rows: int) -> npt.NDArray[Any] | str:
        """Routes [rows, layers, k] of their own memory, sorted; or what is wrong with them."""
        shape = self._shape
        expected = max(rows, 0) * shape.layers * shape.chosen
        if not isinstance(value, str):
            return f"{type(value).__name__}: expected a string"
        if len(value) != -(-expected * _WIDE.itemsize // 3) * 4:
            return (
                f"has {len(value)} characters: expected base64 of int32 "
                f"[{rows}, {shape.layers}, {shape.chosen}]"
            )
        try:
            data = _data_of(value)
        except (binascii.Error, ValueError) as error:
            return f"is not base64: {error}"
        if len(data) != expected * _WIDE.itemsize:
            return f"has {len(data)} bytes: expected {expected * _WIDE.itemsize}"
        wide = np.frombuffer(data, _WIDE).reshape(max(rows, 0), shape.layers, shape.chosen)
        if wide.size and not 0 <= int(wide.min()) <= int(wide.max()) < shape.experts:
            return f"has experts {wide.min()} to {wide.max()}: expected 0 to {shape.experts - 1}"
        narrow = wide.astype(np.uint8 if shape.experts <= 256 else np.uint16)
        # The order says which scored higher. The trainer's own logits say that again, and sorted
        # choices compress to about half.
        narrow.sort(axis=-1)
        return narrow

    def _warn(self, kind: str, cause: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            self._log.warning("routes_missing", cause=cause)


def _data_of(text: str) -> bytes:
    """What base64 says, read in parts: each call holds the interpreter's lock until its end."""
    parts = (text[start : start + _PART] for start in range(0, len(text), _PART))
    return b"".join(base64.b64decode(part, validate=True) for part in parts)
