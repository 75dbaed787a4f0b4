"""A mixture of experts is trained, published through the real service, and served by SGLang."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
import torch
from safetensors.torch import load_file
from tests.contract.engines import running_sglang
from tests.inference_server import save_tokenizer
from tests.integration.weight_sync_rig import WeightSyncRig, rig_with_stores
from tests.unit.areal_torch.engines.hub_families import make_family
from tests.unit.areal_torch.engines.train_fixtures import make_batch, weighted_loss

from areal.config.experiment import GRPOConfig
from areal.config.training import OptimizerConfig, TrainEngineConfig
from areal.security import Security
from areal.types import WeightUpdateMeta
from areal.weights.broadcast import Offer, Seats
from areal.weights.manifest import PolicyVersion
from areal.weights.publisher import NewVersion
from areal.weights.servers import ServerState
from areal_torch.algorithms import packing
from areal_torch.engines.export.publishing import host_tensors, make_publisher
from areal_torch.engines.fsdp import FSDPEngine

VOCABULARY = 131
WAYS = ("disk", "disk", "stream", "stream", "distributed")
"""Of versions 1, 2, …: the second of a kind is a delta."""


TOLERANCE = 1e-5
"""Between the logprobs of SGLang and of the trainer, both in float32."""


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[FSDPEngine]:
    model = make_family("qwen3_moe", tmp_path / "model", vocab_size=VOCABULARY)
    save_tokenizer(model)
    engine = FSDPEngine(TrainEngineConfig(path=str(model), optimizer=OptimizerConfig(lr=1e-5)))
    engine.initialize()
    yield engine
    engine.destroy()


@pytest.fixture
def sglang(engine: FSDPEngine, tmp_path: Path) -> Iterator[str]:
    """A real one's url, at version 0."""
    flags = ("--weight-version", "0", "--random-seed", "5", "--context-length", "128")
    with running_sglang(Path(engine.config.path), tmp_path / "sglang.log", *flags) as (url, _):
        yield url


class Trainer:
    """What the trainer's rank 0 does at the end of a step, with the service's client."""

    def __init__(self, engine: FSDPEngine, rig: WeightSyncRig) -> None:
        self._engine = engine
        self._client = rig.client
        self._loop = asyncio.get_running_loop()
        self._config = GRPOConfig()
        self._config.weight_sync.path = str(rig.weights_root)
        self._config.weight_sync.encoding = "delta"
        self._config.endpoints.weight_sync = rig.address
        self._config.endpoints.weight_store = rig.store
        self.offered = list[PolicyVersion]()
        self.publishers = {
            kind: make_publisher(
                self._config,
                Security.load(self._config.security),
                WeightUpdateMeta(kind),
                self.offer,
            )
            for kind in set(WAYS)
        }

    def offer(self, version: PolicyVersion, offer: Offer) -> Seats:
        self.offered.append(version)
        asked = self._client.offer_version(version, offer)
        return asyncio.run_coroutine_threadsafe(asked, self._loop).result(90)

    def announce(self, version: PolicyVersion) -> None:
        asked = self._client.publish_version(version)
        asyncio.run_coroutine_threadsafe(asked, self._loop).result(90)

    def publish(self, kind: str, version: int, dtype: str) -> PolicyVersion:
        tensors = host_tensors(self._engine.iter_full_tensors(dtype))
        new = NewVersion(version, 1, tensors, Path(self._engine.config.path))
        return self.publishers[kind].publish(new, self.announce)


async def test_experts_when_trained_then_every_transport_publishes_them_by_the_hubs_names(
    engine: FSDPEngine, tmp_path: Path
) -> None:
    async with rig_with_stores(tmp_path, Path(engine.config.path), transport="stream") as rig:
        await rig.started()
        trainer, made = Trainer(engine, rig), list[PolicyVersion]()
        for version, kind in enumerate(WAYS, start=1):
            stats = engine.train_batch(make_batch(version, vocabulary=VOCABULARY), weighted_loss)
            assert stats["skipped_steps"] == 0
            made.append(await asyncio.to_thread(trainer.publish, kind, version, "bfloat16"))
        status = await rig.client.status()
        assert status.current_version == len(WAYS)
        base, *versions = await rig.client.list_versions()
        names = {(tensor.name, tensor.shape) for tensor in base.tensors}
        assert ("model.layers.0.mlp.experts.3.down_proj.weight", (32, 24)) in names
        for published in (*versions, *made, *trainer.offered):
            assert {(tensor.name, tensor.shape) for tensor in published.tensors} == names
        assert trainer.offered
        assert [version.delta is not None for version in made] == [0, 1, 0, 1, 0]
        assert len({published.digest for published in (base, *versions)}) == 1 + len(WAYS)
        stored = load_file(Path(versions[-1].path) / "model.safetensors")
        for name, tensor in engine.iter_full_tensors("bfloat16"):
            assert torch.equal(stored[name], tensor), name


def trainer_logprobs(engine: FSDPEngine, prompt: list[int], output: list[int]) -> torch.Tensor:
    ids, mask = prompt + output, [False] * len(prompt) + [True] * len(output)
    zeros = [0.0] * len(ids)
    sequence = {
        "input_ids": ids,
        "loss_mask": mask,
        "behavior_logprobs": zeros,
        "token_versions": [0 if generated else -1 for generated in mask],
        "rewards": zeros,
    }
    return engine.forward(packing.pack([sequence], [0]))[len(prompt) :]


@pytest.mark.skipif(
    not os.environ.get("AREAL_TEST_SGLANG"),
    reason="starts a real SGLang: AREAL_TEST_SGLANG=1, or make test-sglang",
)
async def test_experts_when_published_then_sglang_answers_with_the_trainers_logprobs(
    engine: FSDPEngine, sglang: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = list(range(2, 14))

    async def ask(http: aiohttp.ClientSession, key: str) -> tuple[list[int], torch.Tensor, str]:
        params = {"max_new_tokens": 32, "temperature": 1.0, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": params, "return_logprob": True}
        body["extra_key"] = key  # as our client does: no cached prefix of an earlier version
        async with http.post("/generate", json=body) as answer:
            assert answer.status == 200, await answer.text()
            raw = await answer.json()
        logprobs = [entry[0] for entry in raw["meta_info"]["output_token_logprobs"]]
        return raw["output_ids"], torch.tensor(logprobs), raw["meta_info"]["weight_version"]

    def worst(output: list[int], logprobs: torch.Tensor) -> float:
        return float((trainer_logprobs(engine, prompt, output) - logprobs).abs().max())

    async with (
        rig_with_stores(tmp_path, Path(engine.config.path)) as rig,
        aiohttp.ClientSession(sglang, timeout=aiohttp.ClientTimeout(total=60)) as http,
    ):
        await rig.started()
        await rig.client.register_server(sglang)
        await rig.until(sglang, ServerState.SERVING, 0)
        output, logprobs, _ = await ask(http, "0")
        at_start = worst(output, logprobs)
        assert at_start <= TOLERANCE
        assert engine.step.optimizer is not None
        engine.config.optimizer.lr = 1e-2
        for seed in range(3):
            engine.train_batch(make_batch(seed, vocabulary=VOCABULARY), weighted_loss)
        moved = worst(output, logprobs)
        assert moved > 100 * TOLERANCE
        await asyncio.to_thread(Trainer(engine, rig).publish, "disk", 1, "float32")
        await rig.until(sglang, ServerState.SERVING, 1)
        output, logprobs, version = await ask(http, "1")
        assert version == "1"
        updated = worst(output, logprobs)
        with capsys.disabled():
            print(
                f"\nlargest difference: {at_start:.1e}, {moved:.2f} trained, {updated:.1e} updated"
            )
        assert updated <= TOLERANCE
