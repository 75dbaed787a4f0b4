"""RewardService: convert, call the pool, convert."""

from __future__ import annotations

from typing import Any

import grpc

from areal.chassis.waits import Waits
from areal.errors import InvalidInput, NotFound
from areal.protocol.trajectories import parse_json_object
from areal.rewards.functions import failure
from areal.v1 import reward_service_pb2 as pb
from areal.v1 import reward_service_pb2_grpc as pb_grpc
from areal_reward.pool import WorkerPool
from areal_reward.recipes import RecipeCache


class RewardService(pb_grpc.RewardServiceServicer):
    """Scores batches of completions over gRPC."""

    def __init__(self, pool: WorkerPool, recipes: RecipeCache, waits: Waits) -> None:
        """Takes the core, where recipes come from, and the record of waits."""
        self._pool = pool
        self._recipes = recipes
        self._waits = waits

    async def Score(  # noqa: N802
        self, request: pb.ScoreRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ScoreResponse:
        """Scores; a bad item, function or recipe is its items' failure, never the call's."""
        reward = request.reward
        if not reward.name:
            raise InvalidInput("reward.name '': expected a function's name")
        parse_json_object(reward.kwargs_json, "reward.kwargs_json")
        recipe = None
        if reward.recipe_digest:
            try:
                with self._waits.on("recipe", "buffer", reward.recipe_digest[:12]):
                    recipe = await self._recipes.get(reward.recipe_digest)
            except NotFound as error:
                unknown = failure(pb.SCORE_ERROR_INVALID, str(error))
                return pb.ScoreResponse(results=[unknown] * len(request.items))
        detail = f"{reward.name}, {len(request.items)} items"
        with self._waits.on("scores", "worker processes", detail):
            results = await self._pool.score(reward, list(request.items), recipe)
        return pb.ScoreResponse(results=results)
