"""A teacher that a server holds: SGLang, or `areal serve`, by its own /generate.

    sequence --POST /generate, logprob_start_len--> the k likeliest ids in the place of each token

It takes the place of a frozen engine in `Distillation.ask`: a teacher larger than the trainer's
memory, on GPUs of its own. Student and teacher have one vocabulary.

| wait       | on         | unblocked by       | deadline                 |
|------------|------------|--------------------|--------------------------|
| an answer  | the server | it                 | `timeout_s` for a batch  |
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import aiohttp
import orjson
import torch
from torch import Tensor

from areal.chassis.backoff import Backoff
from areal.errors import InvalidInput, Unavailable, WaitTimeout
from areal_torch.algorithms.packing import Batch
from areal_torch.engines.model.heads import Head, TopLogprobHead

_AT_ONCE = 16
"""Sequences asked at the same time, by each rank."""
_AGAIN = frozenset({408, 429, 500, 502, 503, 504})


@dataclass(frozen=True)
class ServedTeacher:
    """A teacher behind an SGLang server or `areal serve`: reads its most likely token ids.

    Example:
        >>> teacher = ServedTeacher("http://teacher:30000")
        >>> Distillation(k=16).ask(teacher, batch)
    """

    url: str
    """URL of the server, without a path."""
    api_key: str = field(default_factory=lambda: os.environ.get("TEACHER_API_KEY", ""), repr=False)
    """Sent as a bearer token; "": none."""
    timeout_s: float = 300.0
    """Time limit for all sequences of a batch, retries included, in seconds."""

    def read(self, batch: Batch, head: Head | None = None) -> tuple[Tensor, Tensor]:
        """Returns the teacher's top logprobs for this rank's share; zeros except on loss tokens.

        Args:
            batch: A packed batch without images.
            head: A TopLogprobHead at temperature 1, the temperature of the servers' answers.

        Returns:
            The logprobs, float32 [T, k], in descending order, and their token ids, int64 [T, k].

        Raises:
            InvalidInput: `head` is another one, the batch has images, or the server refuses the
                request, e.g. because of a sequence's length or of k.
            Unavailable: The server is not there, or its answer is not usable.
            WaitTimeout: The server did not answer within `timeout_s`.
        """
        if not isinstance(head, TopLogprobHead) or head.temperature != 1.0:
            raise InvalidInput(
                f"served teacher: {head!r}, expected TopLogprobHead(k) at temperature 1"
            )
        if "pixel_values" in batch:
            raise InvalidInput("served teacher: this batch has images, expected text")
        ids, mask = batch["input_ids"].cpu(), batch["loss_mask"].cpu()
        logprobs = torch.zeros(len(ids), head.k)
        likeliest = torch.zeros(len(ids), head.k, dtype=torch.int64)
        bounds = batch["cu_seqlens"].tolist()
        sequences = []
        for begin, end in pairwise(bounds):
            learned = mask[begin:end].nonzero()
            if len(learned):
                # Nothing is before the first token of all, so nothing can say what it should be.
                sequences.append(_Sequence(ids[begin:end].tolist(), max(int(learned[0]), 1), end))
        for sequence, found in zip(
            sequences, asyncio.run(self._ask(sequences, head.k)), strict=True
        ):
            place = slice(sequence.end - len(found), sequence.end)
            logprobs[place], likeliest[place] = found[..., 0].float(), found[..., 1].long()
        logprobs[~mask], likeliest[~mask] = 0.0, 0
        device = batch["input_ids"].device
        return logprobs.to(device), likeliest.to(device)

    async def _ask(self, sequences: Sequence[_Sequence], k: int) -> list[Tensor]:
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        room, end = asyncio.Semaphore(_AT_ONCE), time.monotonic() + self.timeout_s

        async with aiohttp.ClientSession(headers=headers) as http:

            async def ask(sequence: _Sequence) -> Tensor:
                async with room:
                    return await self._answer(http, sequence, k, end)

            return await asyncio.gather(*map(ask, sequences))

    async def _answer(
        self, http: aiohttp.ClientSession, sequence: _Sequence, k: int, end: float
    ) -> Tensor:
        """Returns [n, k, 2]: logprobs and ids at the places of the last n tokens."""
        body = {
            "input_ids": sequence.ids,
            "sampling_params": {"max_new_tokens": 1, "temperature": 0},
            "return_logprob": True,
            "logprob_start_len": sequence.first - 1,
            "top_logprobs_num": k,
        }
        backoff, said = Backoff(), "no answer"
        while (left := end - time.monotonic()) > 0:
            try:
                async with http.post(
                    f"{self.url.rstrip('/')}/generate",
                    data=orjson.dumps(body),
                    headers={"Content-Type": "application/json"},
                    timeout=aiohttp.ClientTimeout(total=left),
                ) as reply:
                    answer = await reply.read()
                    if reply.status == 200:
                        return self._read(answer, len(sequence.ids) - sequence.first, k)
                    said = f"HTTP {reply.status}: {answer[:200].decode(errors='replace')}"
                    if reply.status not in _AGAIN:
                        raise InvalidInput(f"teacher {self.url}: {said}")
            except (aiohttp.ClientError, TimeoutError) as error:
                said = str(error) or type(error).__name__
            await asyncio.sleep(min(backoff.next(), max(end - time.monotonic(), 0.0)))
        raise WaitTimeout(
            f"teacher {self.url}: waited {self.timeout_s:g} s for logprobs of a batch; {said}"
        )

    def _read(self, answer: bytes, count: int, k: int) -> Tensor:
        """The last `count` positions of `input_top_logprobs`, [count, k, 2]."""
        try:
            entries = json.loads(answer)["meta_info"]["input_top_logprobs"][-count:]
            found = torch.tensor(
                [[(_logprob(p), int(token)) for p, token, *_ in entry] for entry in entries],
                dtype=torch.float64,  # exact for ids, too
            )
            if found.shape != (count, k, 2):
                raise ValueError(f"shape {list(found.shape)}, expected {[count, k, 2]}")
            if not bool((found[..., 0] < torch.inf).all()):  # false for NaN, too
                raise ValueError("a logprob is not a number")
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise Unavailable(f"teacher {self.url}: /generate: {error!r:.200}") from None
        return found


def _logprob(value: float | None) -> float:
    """A logprob; JSON has no -inf, so servers that do not write -Infinity write null."""
    return -math.inf if value is None else float(value)


@dataclass(frozen=True)
class _Sequence:
    ids: list[int]
    first: int
    """Position of the first token to learn."""
    end: int
    """Position in the batch after its last token."""
