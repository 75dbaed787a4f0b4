"""A judge that the CPU engine serves: its chat route, asked by a recipe in a reward worker."""

from __future__ import annotations

import hashlib
import json
import re
import urllib.request
from pathlib import Path

import openai
import pytest
from safetensors.torch import load_file, save_file
from tests.inference_server import running_server
from tests.integration import test_reward_service as rig

from areal.errors import NotFound
from areal.protocol.scores import ScoreError, ScoreFailure, ScoreItem
from areal.v1 import buffer_service_pb2
from areal_torch.models.tiny import make_tiny_model

# A model with random weights says nothing of scores; what it says is the score.
RECIPE = b"""
from areal import rubric
from areal.rewards.judge import Judge

def read(text):
    return sum(text.encode()) % 97 / 96

judge = Judge("default", "Q: {prompt} A: {completion}", parse=read, timeout_s=8.0,
              options={"temperature": 0, "max_tokens": 12})

async def reward_fn(prompt, completions, **data):
    return rubric(liked=await judge(prompt=prompt, completion=completions), long=(1, 0))

strict = Judge("default", timeout_s=8.0, options={"temperature": 0, "max_tokens": 12})

async def strictly(prompt, completions, **data):
    return await strict(prompt=prompt, completion=completions)
"""
DIGEST = hashlib.sha256(RECIPE).hexdigest()
ANSWERS = ["4", "5", "four", "4", "I do not know", "4"]


class Recipes(rig.Recipes):
    async def GetRecipe(self, request, context):
        if request.digest != DIGEST:
            raise NotFound("unknown digest")
        return buffer_service_pb2.GetRecipeResponse(file_name="mine.py", source=RECIPE)


def talkative(folder: Path) -> Path:
    """A tiny model that says more than the last token again, which is all that random weights do
    as long as its layers add little to the embedding."""
    make_tiny_model(folder, num_hidden_layers=1)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith(("proj.weight", "norm.weight")):
            tensors[name] = tensor * 12
    save_file(tensors, file, {"format": "pt"})
    return folder


def finished_requests(url: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    found = re.search(r"^sglang:num_requests_total\S* (\S+)", text, re.MULTILINE)
    assert found, text
    return float(found[1])


async def test_judge_when_our_engine_serves_it_then_scores_are_of_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rig, "Recipes", Recipes)
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    model = talkative(tmp_path / "model")
    items = [ScoreItem("How much is 2+2?", answer) for answer in ANSWERS]
    with running_server(model) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", f"{server.url}/v1")
        async with rig.reward_service(tmp_path) as service, rig.reward_client(service) as client:
            scores = await client.score("reward_fn", DIGEST, {}, items)
            asked = finished_requests(server.url)
            assert asked == len(set(ANSWERS))  # equal answers share one request
            [refused] = await client.score("strictly", DIGEST, {}, items[:1])
        assert isinstance(refused, ScoreFailure)
        assert refused.error is ScoreError.FUNCTION
        assert "no score in" in refused.message
        assert finished_requests(server.url) == asked + 3  # each time it was asked
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as llm:
            for item, score in zip(items, scores, strict=True):
                said = await llm.chat.completions.create(
                    model="default",
                    messages=[
                        {"role": "user", "content": f"Q: {item.prompt} A: {item.completion}"}
                    ],
                    temperature=0,
                    max_tokens=12,
                )
                text = said.choices[0].message.content or ""
                assert score == sum(text.encode()) % 97 / 96, json.dumps(text)
                assert score.parts == {"liked": score, "long": 1.0}
    assert len(set(scores)) > 1
