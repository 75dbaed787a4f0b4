"""What one episode is given: generation, scoring, the tokenizer, and a journal of its calls."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from areal.chassis import tracing
from areal.errors import Unavailable, WorkflowError
from areal.protocol.scores import Sample, ScoreError, ScoreFailure, ScoreItem
from areal.protocol.trajectories import GroupCodec
from areal.recipe import function_reference
from areal.rewards.group import scores_group
from areal.tokenizer import Tokenizer
from areal.types import LLMRequest, LLMResponse, StopReason
from areal.workflows.base import RewardFn
from areal_rollout import journal
from areal_rollout.interfaces import Generation, Scorer


class EpisodeEngine:
    """The `InferenceEngine` of one episode."""

    __slots__ = (
        "_avoid",
        "_calls",
        "_generation",
        "_group",
        "_min_version",
        "_replay",
        "_running",
        "_score_s",
        "_scorer",
        "_seen",
        "_tokenizer",
    )

    def __init__(
        self,
        generation: Generation,
        scorer: Scorer,
        tokenizer: Tokenizer,
        *,
        group: str,
        min_version: int,
        avoid: Collection[str] = (),
        replay: dict[journal.CallKey, LLMResponse] | None = None,
    ) -> None:
        """Holds nothing but references until it is used.

        Args:
            generation: The process's generation client.
            scorer: The process's scorer.
            tokenizer: The process's tokenizer.
            group: Requests without an affinity key of their own share this one.
            min_version: The lease's: no request starts on a server below it.
            avoid: Servers on which earlier attempts failed.
            replay: Calls of an earlier attempt.
        """
        self._generation = generation
        self._scorer = scorer
        self._tokenizer = tokenizer
        self._group = group
        self._min_version = min_version
        self._avoid = avoid
        self._replay = replay
        self._seen: dict[str, int] = {}
        self._calls: list[tuple[LLMRequest, LLMResponse]] = []
        self._running: set[asyncio.Task[Any]] = set()
        self._score_s = 0.0

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the model being trained."""
        return self._tokenizer

    async def agenerate(self, request: LLMRequest) -> LLMResponse:
        """See `areal.workflows.base.InferenceEngine`."""
        [response] = await self._generate(request, 1)
        return response

    async def agenerate_group(self, request: LLMRequest) -> list[LLMResponse]:
        """See `areal.workflows.base.InferenceEngine`."""
        return await self._generate(request, request.gconfig.n_samples)

    async def _generate(self, request: LLMRequest, count: int) -> list[LLMResponse]:
        responses = [self._recall(request) for _ in range(count)]
        self._calls += [(request, response) for response in responses]
        if all(response.stop_reason is not StopReason.ABORT for response in responses):
            return responses
        if not request.affinity_key:
            request = replace(request, affinity_key=self._group)
        task = asyncio.current_task()
        assert task is not None  # a coroutine runs in a task
        self._running.add(task)
        try:
            await self._generation.generate(
                request, responses, min_version=self._min_version, avoid=self._avoid
            )
        finally:
            self._running.discard(task)
        return responses

    async def score(
        self,
        reward_fn: RewardFn,
        *,
        completions: Sequence[str],
        data: dict[str, Any],
        prompt: str = "",
        prompt_ids: Sequence[int] = (),
        completion_ids: Sequence[Sequence[int]] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[float]:
        """See `areal.workflows.base.InferenceEngine`."""
        if isinstance(reward_fn, str):
            digest, name = "", reward_fn
        else:
            digest, name = function_reference(reward_fn)
        samples = [
            Sample(completion, completion_ids[index] if completion_ids else ())
            for index, completion in enumerate(completions)
        ]
        if scores_group(reward_fn):
            items = [ScoreItem(prompt, "", prompt_ids, data=data, samples=samples)]
        else:
            items = [
                ScoreItem(prompt, each.completion, prompt_ids, each.completion_ids, data)
                for each in samples
            ]
        began = time.monotonic()
        with tracing.span("score", {"areal.reward": name, "areal.completions": len(samples)}):
            outcomes = await self._scorer.score(name, digest, kwargs or {}, items)
        self._score_s += time.monotonic() - began
        rewards: list[float] = []
        for outcome in outcomes:
            if isinstance(outcome, ScoreFailure):
                message = f"reward {name!r} ({outcome.error}): {outcome.message}"
                if outcome.error is ScoreError.CRASH:
                    raise Unavailable(message)
                raise WorkflowError(message, outcome.traceback)
            rewards += outcome if isinstance(outcome, list) else [outcome]
        return rewards

    @property
    def interrupted(self) -> bool:
        """Whether some call was started and not finished."""
        return any(response.stop_reason is StopReason.ABORT for _, response in self._calls)

    @property
    def score_s(self) -> float:
        """Returns the seconds that calls of `score` took, added up."""
        return self._score_s

    @property
    def generated_tokens(self) -> int:
        """Returns the number of tokens of all calls so far."""
        return sum(len(response.output_tokens) for _, response in self._calls)

    def journal(self, max_bytes: int, codec: GroupCodec) -> bytes:
        """Returns the calls so far, for the next attempt."""
        return journal.encode(self._calls, max_bytes, codec)

    def close(self) -> None:
        """Cancels calls that the workflow left behind (`gather` does when one of them fails)."""
        current = asyncio.current_task()
        for task in self._running:
            if task is not current:
                task.cancel()

    def _recall(self, request: LLMRequest) -> LLMResponse:
        """Returns what an earlier attempt recorded of this call; else an empty response."""
        if self._replay:
            digest = journal.request_digest(request)
            seen = self._seen.get(digest, 0)
            self._seen[digest] = seen + 1
            kept = self._replay.pop((digest, seen), None)
            if kept is not None:
                kept.input_tokens, kept.images = list(request.input_ids), request.images
                return kept
        response = LLMResponse(list(request.input_ids), [], [], [], StopReason.ABORT)
        response.images = request.images
        return response
