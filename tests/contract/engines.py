"""Inference engines that speak SGLang's protocol, started for real around the same tiny models."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import torch
from tests.inference_server import REPOSITORY, make_model, running_server, save_tokenizer
from tests.ports import free_port

ENGINES = ["embedded", "plain", *(["real"] if os.environ.get("AREAL_TEST_SGLANG") else [])]
"""What the suites run against: the CPU engine's fast decoder, its plain back end, and SGLang, which
`make test-sglang` adds."""
SERVE = REPOSITORY / "tools" / "sglang_cpu" / "serve.sh"
START_TIMEOUT_S = 500.0
"""SGLang imports for a minute, and for several on a busy machine."""
CONTEXT = 4096
VOCABULARY = 131


@dataclass
class EngineUnderTest:
    """One running server and the models it can be switched between; version i is models[i]."""

    name: str
    """ "embedded", "plain" (both areal-inference) or "real" (SGLang)."""
    url: str
    pid: int
    """The process that answers."""
    folders: list[Path]
    models: list[Any]

    @property
    def real(self) -> bool:
        return self.name == "real"

    @property
    def long(self) -> int:
        """Tokens of a request that is still running after a few updates."""
        return 1500 if self.name == "embedded" else 800

    def model(self, version: str) -> Any:
        return self.models[int(version)]


class Http:
    """Calls of one server; answers are (status, parsed body or text)."""

    def __init__(self, engine: EngineUnderTest, session: aiohttp.ClientSession):
        self.engine = engine
        self._session = session

    async def get(self, path: str) -> tuple[int, Any]:
        async with self._session.get(path) as answer:
            return answer.status, _parsed(await answer.text())

    async def post(self, path: str, body: Any) -> tuple[int, Any]:
        async with self._session.post(path, json=body) as answer:
            return answer.status, _parsed(await answer.text())

    async def ok(self, path: str, body: Any) -> Any:
        status, answer = await self.post(path, body)
        assert status == 200, f"{path}: HTTP {status}: {answer}"
        return answer

    async def generate(self, prompt: Any, *, extra: dict[str, Any] | None = None, **params: Any):
        body = {"input_ids": prompt, "sampling_params": params, "return_logprob": True}
        return await self.ok("/generate", {**body, **(extra or {})})

    async def stream(self, prompt: list[int], **params: Any) -> list[str]:
        """The data of each event."""
        body = {"input_ids": prompt, "sampling_params": params, "stream": True}
        body["return_logprob"] = True
        async with self._session.post("/generate", json=body) as answer:
            assert answer.status == 200, await answer.text()
            lines = (await answer.text()).splitlines()
        return [line.removeprefix("data: ") for line in lines if line]

    async def pause(self, mode: str) -> None:
        await self.ok("/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        await self.ok("/continue_generation", {})

    async def update(self, version: int, **values: Any) -> Any:
        folder = str(self.engine.folders[version])
        body = {"model_path": folder, "weight_version": str(version), **values}
        return await self.ok("/update_weights_from_disk", body)

    async def until_updated(self, version: int) -> None:
        """Again while refused: to SGLang a request runs for a step more than its answer needs."""
        folder = str(self.engine.folders[version])
        body = {"model_path": folder, "weight_version": str(version)}
        async with asyncio.timeout(60):
            while (await self.post("/update_weights_from_disk", body))[0] != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    async def version(self) -> str:
        return (await self.get("/model_info"))[1]["weight_version"]

    async def load(self) -> dict[str, Any]:
        return (await self.get("/v1/loads"))[1]["loads"][0]

    async def running(self, count: int) -> None:
        """Returns when this many requests are being decoded."""
        await self.until(lambda load: load["num_running_reqs"] >= count)

    async def advance(self, requests: int, tokens: int = 20) -> None:
        """Returns when so many requests have, on average, so many tokens more."""
        goal = (await self.load())["num_used_tokens"] + requests * tokens
        await self.until(lambda load: load["num_used_tokens"] >= goal)

    async def until(self, holds: Callable[[dict[str, Any]], bool]) -> None:
        """Returns when the server's load is as wanted."""
        async with asyncio.timeout(60):
            while not holds(await self.load()):  # noqa: ASYNC110 - nothing announces it
                await asyncio.sleep(0.01)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


@contextmanager
def running_engine(
    name: str, folders: list[Path], models: list[Any], log: Path
) -> Iterator[EngineUnderTest]:
    """A ready server at version 0."""
    flags = ("--weight-version", "0", "--random-seed", "5", "--context-length", str(CONTEXT))
    flags += ("--max-running-requests", "16")
    if name != "real":
        with running_server(folders[0], *flags) as server:
            yield EngineUnderTest(name, server.url, server.process.pid, folders, models)
        return
    with running_sglang(folders[0], log, *flags) as (url, pid):
        yield EngineUnderTest(name, url, pid, folders, models)


@contextmanager
def running_spelling(name: str, folder: Path, log: Path, *flags: str) -> Iterator[tuple[str, int]]:
    """An engine around a model whose tokens are bytes, with constrained decoding: url and pid."""
    flags = ("--random-seed", "5", "--weight-version", "0", "--max-running-requests", "16", *flags)
    if name == "real":
        with running_sglang(folder, log, *flags, "--grammar-backend", "xgrammar") as served:
            yield served
        return
    with running_server(folder, *flags) as server:
        yield server.url, server.process.pid


@contextmanager
def running_sglang(model: Path, log: Path, *flags: str) -> Iterator[tuple[str, int]]:
    """A real SGLang server on a free port: its url, and the process that answers there."""
    port = free_port()
    command = [str(SERVE), "--model-path", str(model), "--port", str(port), *flags]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, start_new_session=True, env={**os.environ}
        )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_up(process, f"{url}/model_info", log)
        yield url, process.pid
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(60)
        # Its scheduler and detokenizer are processes of their own, in the same group.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(60)


def _wait_up(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        words = log.read_text(errors="replace")[-3000:]
        assert process.poll() is None, f"SGLang ended with {process.returncode}: {words}"
        assert time.monotonic() < deadline, f"SGLang not up in {START_TIMEOUT_S:.0f} s: {words}"
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.3)


def make_versions(name: str, root: Path, count: int) -> tuple[list[Path], list[Any]]:
    """Folders and models of versions 0, 1, …, all different, for one of ENGINES."""
    make = make_composite if name == "plain" else make_model
    folders, models = [root / str(index) for index in range(count)], []
    for index, folder in enumerate(folders):
        folder.mkdir(parents=True)
        models.append(make(folder, seed=20 + index, max_position_embeddings=8192))
        save_tokenizer(folder)
    return folders, models


def make_composite(folder: Path, *, seed: int, max_position_embeddings: int) -> Any:
    """Save a random Qwen3.5: a delta rule, an attention, and a tower that nothing uses."""
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    text = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": max_position_embeddings,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    tower = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "patch_size": 4,
        "out_hidden_size": 32,
        "num_position_embeddings": 16,
    }
    places = ("image", "video", "vision_start", "vision_end")
    config = Qwen3_5Config(
        text_config=text,
        vision_config=tower,
        tie_word_embeddings=True,
        **{f"{name}_token_id": VOCABULARY - 1 - at for at, name in enumerate(places)},
    )
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = Qwen3_5ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.2)
    model.save_pretrained(folder)
    return model


def output_logprobs(answer: Any) -> torch.Tensor:
    """As the server reports them."""
    return torch.tensor([entry[0] for entry in answer["meta_info"]["output_token_logprobs"]])


@torch.no_grad()
def reference(model: Any, prompt: list[int], output: list[int]) -> torch.Tensor:
    """Logits that transformers computes for each output token, [len(output), vocabulary]."""
    logits = model(torch.tensor([prompt + output])).logits[0]
    return logits[len(prompt) - 1 : len(prompt) - 1 + len(output)]


def chosen(logits: torch.Tensor, tokens: list[int], temperature: float = 1.0) -> torch.Tensor:
    """Logprobs of tokens in the temperature-scaled distribution."""
    logprobs = torch.log_softmax(logits / temperature, -1)
    return logprobs.gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1)
