"""What one worker keeps apart: arguments, environments, memory, and functions that end oddly."""

from __future__ import annotations

import hashlib
from pathlib import Path

import grpc
import pytest
from tests.integration import test_reward_service as rig

from areal.errors import NotFound
from areal.protocol.scores import Sample, ScoreError, ScoreFailure, ScoreItem
from areal.v1 import buffer_service_pb2
from areal.v1 import reward_service_pb2 as pb
from areal.v1 import reward_service_pb2_grpc as pb_grpc

RECIPE = b"""
import mmap, os, sys
from areal import group_reward, rubric

loaded = mmap.mmap(-1, 200 << 20)

def scaled(completion, factor):
    return factor * len(completion)

async def leaves(completion):
    if completion == "go": sys.exit(3)
    return float(os.getpid())

async def judged(completion):
    return 0.25

def promises(completion):
    return judged(completion)

@group_reward
def ranked(completions, best):
    place = completions.index(best)
    return [rubric(place=place == at, size=len(text)) for at, text in enumerate(completions)]

@group_reward
async def compared(completions):
    if "die" in completions: os._exit(1)
    return [await judged(text) + at for at, text in enumerate(completions)]

def knows(completion):
    return float(os.environ.get(completion, "0"))

def takes(completion):
    return float(len(bytearray(int(completion) << 20)) >> 20)
"""
DIGEST = hashlib.sha256(RECIPE).hexdigest()


class Recipes(rig.Recipes):
    async def GetRecipe(self, request, context):
        if request.digest != DIGEST:
            raise NotFound("unknown digest")
        return buffer_service_pb2.GetRecipeResponse(file_name="mine.py", source=RECIPE)


def items(*completions: str) -> list[ScoreItem]:
    return [ScoreItem("p", completion) for completion in completions]


async def test_worker_when_it_serves_many_calls_then_none_is_mixed_with_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rig, "Recipes", Recipes)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "7")  # may hold a key of the collector
    monkeypatch.setenv("MINE", "5")
    async with (
        rig.reward_service(tmp_path, "reward.memory_mb=256", "reward.timeout_s=60") as service,
        rig.reward_client(service) as client,
    ):
        # The same function with other arguments is another one.
        for factor in (2, 3, 2):
            scores = await client.score("scaled", DIGEST, {"factor": factor}, items("x", "xyz"))
            assert scores == [factor * 1.0, factor * 3.0]
        # An asynchronous function that leaves has failed, and its worker lives.
        [before] = await client.score("leaves", DIGEST, {}, items("stay"))
        [left, after] = await client.score("leaves", DIGEST, {}, items("go", "stay"))
        assert isinstance(left, ScoreFailure)
        assert left.error is ScoreError.FUNCTION
        assert "leaves raised SystemExit" in left.message
        assert after == before
        # A function that hands on another's promise is waited for.
        assert await client.score("promises", DIGEST, {}, items("x")) == [0.25]
        # A group is scored by one call, also an asynchronous one; parts arrive.
        groups = [
            ScoreItem("p", "", data={"best": best}, samples=[Sample("ab"), Sample("c", [5, 6])])
            for best in ("ab", "c")
        ]
        first, second = await client.score("ranked", DIGEST, {}, groups)
        assert (first, second) == ([3.0, 1.0], [2.0, 2.0])
        assert first[0].parts == {"place": 1.0, "size": 2.0}
        dead = ScoreItem("p", "", samples=[Sample("x"), Sample("die")])
        died, lives = await client.score("compared", DIGEST, {}, [dead, groups[0]])
        assert isinstance(died, ScoreFailure)
        assert died.error is ScoreError.CRASH
        assert lives == [0.25, 1.25]
        # Of the service's environment user code sees what is no secret.
        names = items("OTEL_EXPORTER_OTLP_HEADERS", "MINE", "PYTHONUNBUFFERED")
        assert await client.score("knows", DIGEST, {}, names) == [0.0, 5.0, 1.0]
        # What loading took (200 MiB) does not count; what an item takes does.
        fits, does_not = await client.score("takes", DIGEST, {}, items("100", "400"))
        assert fits == 100.0
        assert isinstance(does_not, ScoreFailure)
        assert "ran out of memory: reward.memory_mb = 256" in does_not.message
        assert await client.score("takes", DIGEST, {}, items("100")) == [100.0]

        async with grpc.aio.insecure_channel(service.listen) as channel:
            spec = pb.RewardSpec(name="math", kwargs_json="[1]")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await pb_grpc.RewardServiceStub(channel).Score(
                    pb.ScoreRequest(reward=spec, items=[pb.ScoreItem(completion="x")])
                )
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert caught.value.details().startswith("reward.kwargs_json: expected a JSON object")
