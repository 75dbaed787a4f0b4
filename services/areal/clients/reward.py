"""Client of RewardService."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from areal.clients.base import Client
from areal.protocol.scores import ScoreError, ScoreFailure, ScoreItem
from areal.v1 import reward_service_pb2 as pb
from areal.v1 import reward_service_pb2_grpc as pb_grpc

_ERROR_FROM_PB = {pb.ScoreError.Value(f"SCORE_ERROR_{error.name}"): error for error in ScoreError}


class RewardClient(Client):
    """Scores completions with a built-in or a recipe's reward function."""

    async def score(
        self,
        spec_name: str,
        recipe_digest: str,
        kwargs: Mapping[str, Any],
        items: Sequence[ScoreItem],
        *,
        timeout: float = 300.0,
        retry_for: float = 30.0,
    ) -> list[float | ScoreFailure]:
        """Scores a batch; scoring again is harmless, so an unavailable service is retried.

        Args:
            spec_name: Function in the recipe, or a built-in: "math", "multiple_choice", "regex".
            recipe_digest: sha256 hex of the recipe's source; "" for a built-in.
            kwargs: Bound to the function before every call; JSON types only.
            items: What to score.
            timeout: Seconds for the whole batch, in one try.
            retry_for: Seconds to keep retrying while the service is away or its queue is full.

        Returns:
            One outcome per item, in order: the reward, or why there is none.

        Raises:
            Unavailable: Away or overloaded for longer than `retry_for`.
            WaitTimeout: No answer within `timeout`.
        """
        if not items:
            return []
        # The samples of a group share one row: encode it once.
        encoded: dict[int, str] = {}
        request = pb.ScoreRequest(
            reward=pb.RewardSpec(
                recipe_digest=recipe_digest,
                name=spec_name,
                kwargs_json=orjson.dumps(dict(kwargs)).decode() if kwargs else "",
            )
        )
        for item in items:
            data_json = encoded.get(id(item.data))
            if data_json is None:
                data_json = orjson.dumps(item.data, option=orjson.OPT_SERIALIZE_NUMPY).decode()
                encoded[id(item.data)] = data_json
            request.items.add(
                prompt=item.prompt,
                completion=item.completion,
                prompt_ids=item.prompt_ids,
                completion_ids=item.completion_ids,
                data_json=data_json,
            )
        stub = pb_grpc.RewardServiceStub(self._channel)
        response = await self._call(stub.Score, request, timeout=timeout, retry_for=retry_for)
        return [_outcome(result) for result in response.results]


def _outcome(result: pb.ScoreResult) -> float | ScoreFailure:
    if result.WhichOneof("outcome") == "reward":
        return result.reward
    failure = result.failure
    return ScoreFailure(
        error=_ERROR_FROM_PB.get(failure.error, ScoreError.FUNCTION),
        message=failure.message,
        traceback=failure.traceback,
    )
