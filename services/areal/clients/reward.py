"""Client of RewardService: scores completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

from areal.clients.base import CallPolicy, Client, Policies
from areal.protocol.scores import ScoreError, ScoreFailure, ScoreItem
from areal.protocol.trajectories import row_json
from areal.types import Score
from areal.v1 import reward_service_pb2 as pb
from areal.v1 import reward_service_pb2_grpc as pb_grpc

_ERROR_FROM_PB = {pb.ScoreError.Value(f"SCORE_ERROR_{error.name}"): error for error in ScoreError}


class RewardClient(Client):
    """Scores completions with a built-in or a recipe's reward function."""

    # A batch of slow functions takes minutes; scoring again is harmless.
    POLICIES: ClassVar[Policies] = {"Score": CallPolicy(300.0, 30.0)}

    @cached_property
    def _stub(self) -> pb_grpc.RewardServiceAsyncStub:
        return pb_grpc.RewardServiceStub(self._channel)

    async def score(
        self,
        spec_name: str,
        recipe_digest: str,
        kwargs: Mapping[str, Any],
        items: Sequence[ScoreItem],
    ) -> list[float | list[float] | ScoreFailure]:
        """Scores a batch.

        Args:
            spec_name: Function in the recipe, or a built-in (`areal.rewards.BUILTIN`).
            recipe_digest: sha256 hex of the recipe's source; "" for a built-in.
            kwargs: Keyword arguments of every call; JSON types only.
            items: What to score.

        Returns:
            One outcome per item, in order: the reward (of a group one of each sample), or why there
            is none.

        Raises:
            Unavailable: The service was down or its queue full for longer than the policy retries.
            WaitTimeout: No answer in time.
        """
        if not items:
            return []
        # The samples of a group share one row: encode it once.
        encoded: dict[int, str] = {}
        request = pb.ScoreRequest(
            reward=pb.RewardSpec(
                recipe_digest=recipe_digest,
                name=spec_name,
                kwargs_json=row_json(dict(kwargs)) if kwargs else "",
            )
        )
        for item in items:
            data_json = encoded.get(id(item.data))
            if data_json is None:
                data_json = row_json(item.data)
                encoded[id(item.data)] = data_json
            request.items.append(item_to_pb(item, data_json))
        response = await self.call(self._stub.Score, request)
        return [score_from_pb(result) for result in response.results]


def item_to_pb(item: ScoreItem, data_json: str) -> pb.ScoreItem:
    """Returns the message of an item; its row is encoded already."""
    return pb.ScoreItem(
        prompt=item.prompt,
        completion=item.completion,
        prompt_ids=item.prompt_ids,
        completion_ids=item.completion_ids,
        data_json=data_json,
        samples=[
            pb.Sample(completion=each.completion, completion_ids=each.completion_ids)
            for each in item.samples
        ],
    )


def score_from_pb(result: pb.ScoreResult) -> float | list[float] | ScoreFailure:
    """Returns the reward, those of a group's samples, or why there is none."""
    if result.WhichOneof("outcome") == "reward":
        return Score(result.reward, result.parts) if result.parts else result.reward
    if result.WhichOneof("outcome") == "group":
        samples = result.group.samples
        return [Score(one.reward, one.parts) if one.parts else one.reward for one in samples]
    failure = result.failure
    return ScoreFailure(
        error=_ERROR_FROM_PB.get(failure.error, ScoreError.FUNCTION),
        message=failure.message,
        traceback=failure.traceback,
    )
