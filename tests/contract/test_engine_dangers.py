"""What SGLang swallows or dies of, and ours refuses: why our services check before they send.

When a newer SGLang behaves better one of these fails: then soften its check.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import aiohttp
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.contract.conftest import ENGINES, Versions
from tests.contract.engines import EngineUnderTest, Http, running_engine

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module", params=ENGINES)
def mortal(
    request: pytest.FixtureRequest,
    versions: Versions,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[EngineUnderTest]:
    """A server of this file's own: the last test may end it."""
    log = tmp_path_factory.mktemp("mortal") / "server.log"
    with running_engine(request.param, *versions(request.param), log) as running:
        yield running


@pytest.fixture
async def http(mortal: EngineUnderTest) -> AsyncIterator[Http]:
    async with aiohttp.ClientSession(mortal.url) as session:
        yield Http(mortal, session)


def unknown(tensors: Tensors) -> None:
    tensors["model.layers.0.self_attn.r_proj.weight"] = torch.zeros(4, 4)


def norm(tensors: Tensors) -> str:
    """The decoder's last one: composites have it below the language model."""
    return next(
        n for n in tensors if n.endswith(("model.norm.weight", "language_model.norm.weight"))
    )


def missing(tensors: Tensors) -> None:
    del tensors[norm(tensors)]


def not_finite(tensors: Tensors) -> None:
    tensors[norm(tensors)][0] = float("nan")


@pytest.mark.parametrize("spoil", [unknown, missing, not_finite])
async def test_update_when_tensors_are_wrong_then_sglang_reports_success(
    http: Http, tmp_path: Path, spoil: Callable[[Tensors], None]
):
    """Weight-sync compares names and shapes with version 0 and digests with the trainer's."""
    folder = tmp_path / "spoilt"
    shutil.copytree(http.engine.folders[1], folder)
    tensors = load_file(folder / "model.safetensors")
    spoil(tensors)
    save_file(tensors, folder / "model.safetensors")
    body = {"model_path": str(folder), "weight_version": "7"}
    status, answer = await http.post("/update_weights_from_disk", body)
    assert (status, answer["success"]) == ((200, True) if http.engine.real else (400, False))
    assert await http.version() == ("7" if http.engine.real else "0")
    await http.update(0)


async def test_generate_when_a_token_is_out_of_vocabulary_then_sglang_dies(http: Http):
    """Our client checks the range of every token id first."""
    body = {"input_ids": [5, 5000], "sampling_params": {"max_new_tokens": 2}}
    if not http.engine.real:
        assert (await http.post("/generate", body))[0] == 400
        assert (await http.get("/health"))[0] == 200
        return
    async with asyncio.timeout(300):
        with pytest.raises(aiohttp.ClientError):
            await http.post("/generate", body)
        with pytest.raises(aiohttp.ClientError):
            await http.get("/health")
