"""Checkpoints of several models are trained, exported and published, and served by real SGLang."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.contract.engines import running_sglang
from tests.contract.processor_files import save_processor
from tests.contract.test_engine_experts import TOLERANCE, Trainer, trainer_logprobs
from tests.integration.weight_sync_rig import rig_with_stores
from tests.unit.areal_torch.engines.tiny_families import saved, text_batch
from tests.unit.areal_torch.engines.train_fixtures import weighted_loss

from areal.config.training import OptimizerConfig, TrainEngineConfig
from areal.weights.servers import ServerState
from areal_torch.engines.fsdp import FSDPEngine
from areal_torch.engines.model import guards

_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
SERVED: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": {"attn_logit_softcapping": None},
        "vision_config": {"vision_use_head": False},
    },
    "glm4v": {
        "text_config": {
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5},
        }
    },
    "mistral3": {"text_config": {"sliding_window": None}, "tie_word_embeddings": False},
    "qwen2_vl": {"vision_config": {"in_chans": 3}},
    "qwen3_vl": {},
}
"""Families, with what makes the tiny model like the published ones; the others: docs/sglang.md."""
FLAGS = {"mistral3": ("--json-model-override-args", '{"language_model_only": true}')}
"""Of SGLang; this one keeps it from clearing a cache that Mistral 3's processor lacks."""
PROMPTS = [list(range(first, first + 12)) for first in (3, 20, 40, 60)]
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(
        not os.environ.get("AREAL_TEST_SGLANG"),
        reason="starts a real SGLang: AREAL_TEST_SGLANG=1, or make test-sglang",
    ),
]


@pytest.fixture(params=sorted(SERVED))
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def engine(kind: str, tmp_path: Path) -> Iterator[FSDPEngine]:
    source = tmp_path / "source"
    save(kind, source)
    engine = FSDPEngine(
        TrainEngineConfig(
            path=str(source),
            dtype="float32",
            gradient_checkpointing="none",
            optimizer=OptimizerConfig(lr=1e-2, warmup_steps_proportion=0.0),
        )
    )
    engine.initialize(total_train_steps=10)
    yield engine
    engine.destroy()


def save(kind: str, source: Path) -> None:
    """Writes a family's tiny model as the Hub has it."""
    saved(kind, source, scale=0.5, **SERVED[kind])  # wild weights amplify the rounding of float32
    if kind == "gemma3":  # transformers reads the Hub's names of the tower, but writes others
        file = source / "model.safetensors"
        named = {
            name.replace("vision_tower.", "vision_tower.vision_model."): tensor
            for name, tensor in load_file(file).items()
        }
        save_file(named, file, {"format": "pt"})
    save_processor(kind, source)


def train(engine: FSDPEngine) -> None:
    batch = text_batch(engine.model.hf)
    for _ in range(2):
        assert engine.train_batch(batch, weighted_loss)["skipped_steps"] == 0


async def sample(http: aiohttp.ClientSession, version: str) -> list[tuple[list[int], torch.Tensor]]:
    """Answers to all prompts, by their tokens and logprobs."""
    params = {"max_new_tokens": 24, "temperature": 1.0, "ignore_eos": True}
    body = {"input_ids": PROMPTS, "sampling_params": params, "return_logprob": True}
    body["extra_key"] = version  # as our client does: no cached prefix of an earlier version
    async with http.post("/generate", json=body) as answer:
        assert answer.status == 200, await answer.text()
        answers = await answer.json()
    assert {each["meta_info"]["weight_version"] for each in answers} == {version}
    return [
        (
            each["output_ids"],
            torch.tensor([entry[0] for entry in each["meta_info"]["output_token_logprobs"]]),
        )
        for each in answers
    ]


def worst(engine: FSDPEngine, answers: list[tuple[list[int], torch.Tensor]]) -> float:
    """The largest difference from the trainer's logprobs, up to the first image or sound."""
    reserved, compared, found = set(guards.placeholders(engine.model.hf.config)), 0, 0.0
    for prompt, (ids, logprobs) in zip(PROMPTS, answers, strict=True):
        text = list(takewhile(lambda token: token not in reserved, ids))
        if text:
            ours = trainer_logprobs(engine, prompt, text)
            found = max(found, float((ours - logprobs[: len(text)]).abs().max()))
            compared += len(text)
    assert compared >= 20
    return found


async def test_composite_when_exported_and_published_then_sglang_has_the_trainers_logprobs(
    kind: str, engine: FSDPEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(engine)
    export = tmp_path / "export"
    engine.save(export)
    flags = ("--weight-version", "0", "--random-seed", "5", "--context-length", "128")
    flags += FLAGS.get(kind, ())
    with running_sglang(export, tmp_path / "sglang.log", *flags) as (url, _):
        async with (
            rig_with_stores(tmp_path, export) as rig,
            aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(total=120)) as http,
        ):
            await rig.started()
            await rig.client.register_server(url)
            await rig.until(url, ServerState.SERVING, 0)
            answers = await sample(http, "0")
            exported = worst(engine, answers)
            assert exported <= TOLERANCE
            train(engine)
            moved = worst(engine, answers)
            assert moved > 100 * TOLERANCE
            await asyncio.to_thread(Trainer(engine, rig).publish, "disk", 1, "float32")
            await rig.until(url, ServerState.SERVING, 1)
            published = worst(engine, await sample(http, "1"))
    with capsys.disabled():
        print(f"\n{exported:.1e} exported, {moved:.2f} trained, {published:.1e} published")
    assert published <= TOLERANCE
