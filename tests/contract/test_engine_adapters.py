"""Versions that are adapters (LoRA), on the CPU engine's two decoders and on real SGLang."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from tests.contract.engines import ENGINES, running_sglang
from tests.inference_server import make_model, running_server
from tests.unit.areal_weight_sync.weight_sync_fakes import FakeStore

from areal.config.training import LoraConfig, TrainEngineConfig
from areal.types import GenerationHyperparameters, LLMRequest, LLMResponse, StopReason
from areal.weights.manifest import PolicyVersion, build_manifest
from areal.weights.publisher import NewVersion
from areal.weights.safetensors import HostTensor
from areal.weights.servers import ServerState
from areal_rollout.generation.client import SGLangClient
from areal_rollout.generation.protocol import ModelLimits
from areal_rollout.generation.server_table import ServerTable
from areal_torch.engines.fsdp import FSDPEngine
from areal_torch.engines.model import lora
from areal_torch.publish.disk import DiskPublisher
from areal_weight_sync.config import WeightSyncConfig
from areal_weight_sync.coordinator import Coordinator
from areal_weight_sync.engine.base import EngineError
from areal_weight_sync.engine.http import HttpEngine, open_session

TOLERANCE = 2e-4
PROMPT = [5, 17, 99, 3, 42]
RANK, ALPHA = 4, 8
UPDATES = 20
FLAGS = ("--enable-lora", "--max-lora-rank", str(RANK), "--max-running-requests", "16")
SGLANG = (
    *("--max-loras-per-batch", "4", "--lora-backend", "torch_native"),
    *("--lora-target-modules", "q_proj", "k_proj", "v_proj", "o_proj"),
    *("gate_proj", "up_proj", "down_proj"),
)
pytestmark = pytest.mark.timeout(600)


class Trainer:
    """Adapters that change at each version, and what it computes with each of them."""

    def __init__(self, model: Path, root: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model, self.root = model, root
        config = LoraConfig(rank=RANK, alpha=ALPHA)
        self.engine = FSDPEngine(TrainEngineConfig(path=str(model), lora=config))
        self.engine.initialize()
        self.base = build_manifest(model, 0, 0)
        self._described = lora.Described(config, self.base.digest)
        self._versions = {0: self._adapters()}
        self._plain = AutoModelForCausalLM.from_pretrained(model, dtype="float32").eval()
        self._start = {name: t.clone() for name, t in self._plain.state_dict().items()}

    def _adapters(self) -> dict[str, torch.Tensor]:
        return {n: p.detach().clone() for n, p in lora.saved_parameters(self.engine.model)}

    def step(self, version: int, size: float = 0.02) -> PolicyVersion:
        """Other adapters, published."""
        torch.manual_seed(version)
        with torch.no_grad():
            for name, parameter in lora.saved_parameters(self.engine.model):
                parameter += size * torch.randn_like(parameter) * ("lora_B" in name)
        self._versions[version] = self._adapters()
        found: list[PolicyVersion] = []

        def deliver(tensors: tuple[HostTensor, ...], _: Any) -> None:
            new = NewVersion(version, 1, tensors, self.model)
            new = replace(new, adapter=self._described.info(new.name, tensors))
            DiskPublisher(self.root).publish(new, found.append)

        self.engine.export(None, deliver, adapters=True).result(60)
        return found[0]

    @torch.no_grad()
    def logprobs(self, ids: list[int], version: int) -> torch.Tensor:
        """Of each token but the first."""
        adapters = self._versions[version]
        merged = dict(self._start)
        for name in (n for n in adapters if ".lora_A." in n):
            up = adapters[name.replace(".lora_A.", ".lora_B.")]
            weight = name.removeprefix("hf.").partition(".lora_A.")[0] + ".weight"
            merged[weight] = self._start[weight] + ALPHA / RANK * up @ adapters[name]
        self._plain.load_state_dict(merged)
        logits = self._plain(torch.tensor([ids]), use_cache=False).logits[0, :-1]
        return logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


@dataclass
class Kind:
    """How servers of one engine are made."""

    name: str
    model: Path
    log: Path

    @contextmanager
    def server(self, number: int) -> Iterator[tuple[str, int]]:
        """A server: its url and the process that answers."""
        if self.name == "real":
            log = self.log.with_name(f"sglang-{number}.log")
            with running_sglang(self.model, log, *FLAGS, *SGLANG, "--skip-tokenizer-init") as made:
                yield made
            return
        with running_server(self.model, *FLAGS) as server:
            yield server.url, server.process.pid


@pytest.fixture(params=ENGINES)
def kind(request: pytest.FixtureRequest, tmp_path: Path) -> Kind:
    model = tmp_path / "model"
    if request.param == "plain":
        from transformers import AutoModelForCausalLM, Qwen3Config

        torch.manual_seed(3)
        config = Qwen3Config(
            vocab_size=131, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, head_dim=16, tie_word_embeddings=True,
            max_position_embeddings=1024, bos_token_id=0, eos_token_id=1, pad_token_id=0,
        )  # fmt: skip
        AutoModelForCausalLM.from_config(config).save_pretrained(model)
    else:
        make_model(model, seed=3)
    return Kind(request.param, model, tmp_path / "log")


@pytest.fixture
def trainer(kind: Kind, tmp_path: Path) -> Iterator[Trainer]:
    made = Trainer(kind.model, tmp_path / "weights")
    yield made
    made.engine.destroy()


class Unobserved:
    def request_done(self, seconds: float, tokens: int) -> None: ...
    def interruption(self, kind: str) -> None: ...
    def salvaged(self, tokens: int) -> None: ...


class World:
    """Weight-sync and a rollout's client, in this process."""

    def __init__(self, trainer: Trainer, session: aiohttp.ClientSession) -> None:
        self.trainer = trainer
        self.tasks: list[asyncio.Task[None]] = []
        self.engines: dict[str, HttpEngine] = {}
        self.session = session

        def spawn(coroutine: Any, name: str) -> asyncio.Task[None]:
            self.tasks.append(asyncio.create_task(coroutine, name=name))
            return self.tasks[-1]

        def connect(url: str) -> HttpEngine:
            self.engines[url] = HttpEngine(url, session)
            return self.engines[url]

        config = WeightSyncConfig(
            weights_root=trainer.root, probe_interval_s=0.2, update_timeout_s=120.0,
            probe_timeout_s=10.0, backoff_s=0.1, keep_versions=2,
        )  # fmt: skip
        self.coordinator = Coordinator(config, FakeStore(), connect, spawn, spawn)
        self.table = ServerTable()
        self.client = SGLangClient(
            self.table,
            ModelLimits(vocab_size=131, context_length=1024),
            report=self._report,
            observer=Unobserved(),
            request_timeout_s=120.0,
            setup_timeout_s=120.0,
        )

    async def _report(self, url: str, cause: str) -> None:
        self.coordinator.report(url.removeprefix("http://"), cause)

    async def feed(self) -> None:
        """The table follows the coordinator, as announcements make it."""
        feed = self.coordinator.open_feed()
        while True:
            self.table.update(self.coordinator.servers())
            await feed.take(0.05)

    def register(self, url: str) -> None:
        self.coordinator.register(url.removeprefix("http://"), url)

    async def at(self, version: int, *urls: str) -> None:
        """All these servers serve this version."""
        wanted = {url.removeprefix("http://") for url in urls}
        async with asyncio.timeout(150):
            while not wanted <= {  # noqa: ASYNC110 - the feed belongs to the table
                each.server_id
                for each in self.coordinator.servers()
                if each.state is ServerState.SERVING and each.version == version
            }:
                await asyncio.sleep(0.02)

    async def check(self, url: str, version: PolicyVersion) -> None:
        """A server computes what the trainer does with the version's adapter."""
        ids = [7 * n % 131 for n in range(1, 30)]
        async with asyncio.timeout(60):
            while True:
                # The update's last step aborts what runs, this too.
                with contextlib.suppress(EngineError):
                    name = version.adapter_name
                    found = await self.engines[url].logprobs(ids, version.name, name)
                    break
        wanted = self.trainer.logprobs(ids, version.version)
        torch.testing.assert_close(torch.tensor(found), wanted, rtol=0, atol=TOLERANCE)

    async def generate(self, tokens: int) -> LLMResponse:
        sampling = GenerationHyperparameters(max_new_tokens=tokens, temperature=1.0)
        response = LLMResponse(list(PROMPT), [], [], [], StopReason.ABORT)
        await self.client.generate(LLMRequest(list(PROMPT), sampling), [response])
        return response

    def check_response(self, response: LLMResponse) -> None:
        """Each token's logprob is that of the version that it says sampled it."""
        ids = [*PROMPT, *response.output_tokens]
        for version in set(response.output_versions):
            wanted = self.trainer.logprobs(ids, version)[len(PROMPT) - 1 :]
            for index, each in enumerate(response.output_versions):
                if each == version:
                    gap = abs(response.output_logprobs[index] - float(wanted[index]))
                    assert gap < TOLERANCE, (index, version, response.output_versions)


@pytest.fixture
async def world(trainer: Trainer) -> AsyncIterator[World]:
    async with open_session({}) as session:
        made = World(trainer, session)
        made.coordinator.start(type("Empty", (), {
            "current": None, "base": None, "records": [], "totals": made.coordinator.totals,
        })())  # fmt: skip
        await made.client.start()
        feeding = asyncio.create_task(made.feed())
        try:
            yield made
        finally:
            feeding.cancel()
            for task in made.tasks:
                task.cancel()
            await asyncio.gather(feeding, *made.tasks, return_exceptions=True)
            await made.client.close()


async def _adapters(url: str, session: aiohttp.ClientSession) -> set[str]:
    return set(await HttpEngine(url, session).adapters())


@pytest.mark.long
async def test_adapters_when_a_server_dies_and_one_joins_then_all_compute_what_the_trainer_does(
    kind: Kind, world: World
) -> None:
    """Twenty updates; requests run through all of them and keep the version of each token."""
    trainer, sync = world.trainer, world.coordinator
    await sync.publish_model(kind.model)
    with ExitStack() as stack:
        # SGLang takes a minute to start: there the first is killed once another one has joined.
        doomed = stack.enter_context(kind.server(1))
        killed_at = 12 if kind.name == "real" else 7
        urls = [doomed[0]]
        if kind.name != "real":
            urls.append(stack.enter_context(kind.server(2))[0])
        for url in urls:
            world.register(url)
        await world.at(0, *urls)
        assert (await world.generate(8)).output_versions == [0] * 8
        responses: list[LLMResponse] = []
        for step in range(1, UPDATES + 1):
            running = [asyncio.create_task(world.generate(60)) for _ in range(3)]
            if step == killed_at:
                os.kill(doomed[1], signal.SIGKILL)
                urls.remove(doomed[0])
            if step == 9:
                joined, _ = stack.enter_context(kind.server(3))
                urls.append(joined)
                world.register(joined)
            version = trainer.step(step)
            assert version.adapter is not None
            await sync.publish(version)
            await world.at(step, *urls)
            for url in urls:
                await world.check(url, version)
                held = await _adapters(url, world.session)
                assert version.adapter_name in held
                assert len(held) <= 3, f"adapters pile up: {held}"
            responses += await asyncio.gather(*running)
        for response in responses:
            world.check_response(response)
        assert max(max(r.output_versions) for r in responses) >= UPDATES - 1
        assert any(len(set(r.output_versions)) > 1 for r in responses), "some spanned an update"


async def test_requests_when_they_name_different_adapters_then_each_is_computed_with_its_own(
    kind: Kind, world: World
) -> None:
    if kind.name == "real":
        pytest.skip("twenty updates on one server show it, and this would take another start")
    with kind.server(1) as (url, _):
        versions = [world.trainer.step(number, size=0.05) for number in (1, 2)]
        engine = HttpEngine(url, world.session)
        for version in versions:
            await engine.load_adapter(version, timeout=30)
        names = [versions[0].adapter_name, "", versions[1].adapter_name, versions[0].adapter_name]
        prompts = [[*PROMPT, number] for number in range(4)]
        body = {
            "input_ids": prompts,
            "lora_path": [name or None for name in names],
            "sampling_params": {"max_new_tokens": 12, "temperature": 1.0, "ignore_eos": True},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        async with world.session.post(f"{url}/generate", json=body) as http:
            assert http.status == 200, await http.text()
            answers = await http.json()
        by_name = {"": 0} | {version.adapter_name: version.version for version in versions}
        for prompt, name, answer in zip(prompts, names, answers, strict=True):
            meta = answer["meta_info"]
            found = [e[0] for e in meta["input_token_logprobs"][1:]]
            found += [e[0] for e in meta["output_token_logprobs"]]
            wanted = world.trainer.logprobs([*prompt, *answer["output_ids"]], by_name[name])
            torch.testing.assert_close(torch.tensor(found), wanted, rtol=0, atol=TOLERANCE)


async def test_adapter_when_a_request_runs_with_it_then_unloading_leaves_the_request_whole(
    kind: Kind, world: World
) -> None:
    if kind.name == "real":
        pytest.skip("twenty updates on one server show it, and this would take another start")
    with kind.server(1) as (url, _):
        version = world.trainer.step(1, size=0.05)
        engine = HttpEngine(url, world.session)
        await engine.load_adapter(version, timeout=30)
        body = {
            "input_ids": PROMPT,
            "lora_path": version.adapter_name,
            "sampling_params": {"max_new_tokens": 200, "temperature": 1.0, "ignore_eos": True},
            "return_logprob": True,
        }

        async def generate() -> Any:
            async with world.session.post(f"{url}/generate", json=body) as http:
                return http.status, await http.json()

        running = asyncio.create_task(generate())
        async with asyncio.timeout(60):
            while not await engine.running():  # noqa: ASYNC110 - nothing announces it
                await asyncio.sleep(0.005)
        with contextlib.suppress(asyncio.CancelledError):
            await engine.unload_adapter(version.adapter_name, timeout=30)
        status, answer = await running
        assert status == 200
        assert len(answer["output_ids"]) == 200
        wanted = world.trainer.logprobs([*PROMPT, *answer["output_ids"]], 1)[len(PROMPT) - 1 :]
        found = torch.tensor([e[0] for e in answer["meta_info"]["output_token_logprobs"]])
        torch.testing.assert_close(found, wanted, rtol=0, atol=TOLERANCE)
        assert (await generate())[0] == 400, "what was unloaded is not there"
