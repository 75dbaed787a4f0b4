"""A policy that answers at once, and rewards computed in this process."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Collection, Mapping, Sequence
from itertools import islice
from types import ModuleType
from typing import Any

import orjson

from areal.clients.reward import item_to_pb, score_from_pb
from areal.errors import InvalidInput
from areal.protocol.scores import ScoreFailure, ScoreItem
from areal.recipe import find_function
from areal.rewards import builtin_reward
from areal.rewards.functions import RewardFunction, failure, raised, too_slow
from areal.tokenizer import Tokenizer
from areal.tokenizer.json_text import dumps
from areal.types import LLMRequest, LLMResponse, StopReason
from areal.v1 import reward_service_pb2 as pb
from areal_rollout.check.report import Report
from areal_rollout.generation.protocol import ModelLimits

# A sentence, a number, nothing at all: a policy says all of these, and no reward may fail on them.
_ANSWERS = ("The answer is 42.", "7", "")


class FakePolicy:
    """Legal answers, the same ones each time, in place of the inference servers."""

    def __init__(self, tokenizer: Tokenizer, context_length: int) -> None:
        """Wires it up.

        Args:
            tokenizer: The model's tokenizer.
            context_length: Prompt and answer together, in tokens.
        """
        self._tokenizer = tokenizer
        stops = tuple(tokenizer.eos_token_ids)
        self._limits = ModelLimits(tokenizer.vocab_size, context_length, stops)
        self.answers = 0

    async def generate(
        self,
        request: LLMRequest,
        responses: Sequence[LLMResponse],
        *,
        min_version: int,
        avoid: Collection[str],
    ) -> None:
        """Returns the next answers; refuses what the servers' client refuses."""
        self._limits.check(request)
        for response in responses:
            self._answer(request, response, min_version)

    def _answer(self, request: LLMRequest, response: LLMResponse, version: int) -> None:
        gconfig = request.gconfig
        most = min(gconfig.max_new_tokens, self._limits.room(len(request.input_ids)))
        text = _ANSWERS[self.answers % len(_ANSWERS)]
        self.answers += 1
        stops = [*self._limits.eos_token_ids, *gconfig.stop_token_ids]
        words = [
            token
            for token in self._tokenizer.encode(text, add_special_tokens=False)
            if token < self._limits.vocab_size and token not in stops
        ]
        least = min(gconfig.min_new_tokens, most)
        filler = words or [next(t for t in range(self._limits.vocab_size) if t not in stops)]
        words += islice(_again(filler), max(0, least - len(words)))
        reason = StopReason.STOP
        if stops and len(words) < most:
            words.append(stops[0])
        else:
            words = [*words, *islice(_again(filler), max(0, most - len(words)))][:most]
            reason = StopReason.LENGTH
        response.output_tokens += words
        response.output_logprobs += [-1.0] * len(words)
        response.output_versions += [version] * len(words)
        response.stop_reason = reason

    async def wait_ready(self, timeout: float) -> bool:
        """Returns at once: the fake is always ready."""
        return True

    async def interrupt(self, timeout: float) -> None:
        """Does nothing: no request is ever in flight."""


class InProcessScorer:
    """Calls reward functions as a reward worker does, here."""

    def __init__(self, module: ModuleType | None, timeout_s: float, report: Report) -> None:
        """Wires it up.

        Args:
            module: The recipe.
            timeout_s: For one call.
            report: Is told before a call that may hang.
        """
        self._module = module
        self._timeout_s = timeout_s
        self._report = report
        self.name = ""
        """Name of the function that was requested last; "" before the first call."""
        self.rewards: list[float] = []
        self.failure: ScoreFailure | None = None

    async def score(
        self,
        spec_name: str,
        recipe_digest: str,
        kwargs: Mapping[str, Any],
        items: Sequence[ScoreItem],
    ) -> list[float | list[float] | ScoreFailure]:
        """Returns one outcome per item, in order."""
        self.name = spec_name
        results = [await self._one(spec_name, recipe_digest, kwargs, item) for item in items]
        return [self._noted(result) for result in results]

    def _noted(self, result: pb.ScoreResult) -> float | list[float] | ScoreFailure:
        score = score_from_pb(result)
        if isinstance(score, ScoreFailure):
            self.failure = score
        else:
            self.rewards += score if isinstance(score, list) else [score]
        return score

    async def _one(
        self, name: str, digest: str, kwargs: Mapping[str, Any], item: ScoreItem
    ) -> pb.ScoreResult:
        try:
            if digest:
                assert self._module is not None
                found = find_function(self._module, name)
            else:
                found = builtin_reward(name)
            function = RewardFunction(name, found, dict(kwargs))
            row = dumps(item.data, option=orjson.OPT_SERIALIZE_NUMPY).decode()
            message = item_to_pb(item, row)
            arguments, named = function.bind(message)
        except (InvalidInput, TypeError) as error:
            return failure(pb.SCORE_ERROR_INVALID, str(error))
        late = too_slow(name, self._timeout_s)
        limit = asyncio.timeout(self._timeout_s)
        try:
            with self._report.within(self._timeout_s, "reward", "failed", late):
                value = function.call(arguments, named)
            if inspect.isawaitable(value):
                async with limit:
                    value = await value
            return function.result(value, message)
        except (Exception, SystemExit) as error:
            if isinstance(error, TimeoutError) and limit.expired():
                return failure(pb.SCORE_ERROR_TIMEOUT, late)
            return raised(name, error, function.file)


def _again(tokens: Sequence[int]) -> Any:
    while True:
        yield from tokens
