"""Weights that stream to an engine without a shared folder: whole, then as what changed.

areal-inference pulls from the weight store itself; beside SGLang the sidecar's process does.
"""

from __future__ import annotations

import asyncio
import copy
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.contract.engines import Http, chosen, output_logprobs, reference
from tests.contract.transport_rig import free_port
from tests.inference_server import REPOSITORY

from areal.security import Security
from areal.weights.delta import DeltaChain
from areal.weights.manifest import PolicyVersion, build_manifest
from areal.weights.publisher import NewVersion
from areal_torch.engines.export.publishing import host_tensors
from areal_torch.publish.stream import StreamPublisher
from areal_weight_sync.engine.http import HttpEngine, open_session
from areal_weight_sync.engine.routes import Routes
from areal_weight_sync.store.http import StoreApp
from areal_weight_sync.store.weights import WeightStore

PROMPT = [5, 17, 99, 3, 42]
TOLERANCE = 1e-4


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[int]:
    """Its process, as it runs beside an SGLang; gives its port."""
    port = free_port()
    command = [sys.executable, "-m", "areal.weights.sidecar", "--listen", f"127.0.0.1:{port}"]
    env = {"PYTHONPATH": str(REPOSITORY / "services")}
    log = tmp_path / "sidecar.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--folder", str(tmp_path / "memory")], stdout=output, stderr=output, env=env
        )
    try:
        yield port
    finally:
        process.terminate()
        assert process.wait(60) == 0, log.read_text()


async def listening(url: str) -> None:
    def answers() -> bool:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return True
        except (urllib.error.URLError, OSError):
            return False

    async with asyncio.timeout(60):
        while not await asyncio.to_thread(answers):  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(0.1)


def shifted(model: torch.nn.Module, seed: int) -> torch.nn.Module:
    """A model of which 3 % of the elements are others."""
    changed, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in changed.parameters():
            mask = torch.rand(parameter.shape, generator=generator) < 0.03
            parameter += mask * 0.5 * torch.randn(parameter.shape, generator=generator)
    return changed


@pytest.mark.parametrize("by", ["itself", "sidecar"])
async def test_engine_when_versions_stream_then_it_computes_with_each(
    http: Http, sidecar: int, tmp_path: Path, by: str
) -> None:
    folder = http.engine.folders[0]
    base = build_manifest(folder, 0, 0)
    published: list[PolicyVersion] = []
    port = free_port()
    store = StoreApp(
        WeightStore(tmp_path / "store", folder),
        lambda: [*published[-1:], base],
        lambda: base,
        Security(),
    )
    await store.start("127.0.0.1", port)
    url, names = f"http://127.0.0.1:{port}", load_file(folder / "model.safetensors").keys()
    await listening(f"http://127.0.0.1:{sidecar}/healthz")
    publisher = StreamPublisher(url, Security(), 10.0, chain=DeltaChain())
    model = http.engine.models[1]
    try:
        async with open_session({}) as session:
            engine = HttpEngine(http.engine.url, session, routes=Routes(("stream",), url, sidecar))
            for number in (1, 2, 3):
                model = model if number == 1 else shifted(model, number)
                state = model.state_dict()
                new = NewVersion(number, 1, host_tensors((n, state[n]) for n in names), folder)
                version = await asyncio.to_thread(publisher.publish, new, published.append)
                assert (version.delta is not None) == (number > 1)
                await http.pause("in_place")
                if by == "itself":
                    await engine.load(version, flush_cache=False, timeout=60.0)
                else:
                    body = {"model_path": f"{url}/versions/{new.name}"}
                    async with session.post(
                        f"http://127.0.0.1:{sidecar}/stage_weights", json=body
                    ) as answer:
                        assert answer.status == 200, await answer.text()
                        body = {"model_path": (await answer.json())["model_path"]}
                    assert str(tmp_path / "memory") in body["model_path"]
                    body |= {"weight_version": version.name, "flush_cache": False}
                    assert (await http.ok("/update_weights_from_disk", body))["success"] is True
                await http.resume()
                assert await http.version() == version.name
                answer = await http.generate(
                    PROMPT, max_new_tokens=8, temperature=1.0, extra={"extra_key": version.name}
                )
                output = answer["output_ids"]
                torch.testing.assert_close(
                    output_logprobs(answer),
                    chosen(reference(model, PROMPT, output), output),
                    atol=TOLERANCE,
                    rtol=0,
                )
    finally:
        await store.close()
    if by == "sidecar" or http.engine.real:  # the later ones came as what changed
        made = sorted(path.parent.name for path in (tmp_path / "memory").glob("*/delta.bin"))
        assert made == ["v00000002-inc1", "v00000003-inc1"]
