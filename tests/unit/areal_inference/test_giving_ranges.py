"""A version that one server holds, read by another in ranges."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest
import torch
import uvicorn
from safetensors.torch import save_file
from starlette.applications import Starlette
from starlette.routing import Route

from areal.weights.manifest import WeightFile, WeightTensor, assemble_manifest
from areal.weights.safetensors import digest_of, read_layout
from areal_inference.http_api import giving
from areal_inference.model import sources
from areal_inference.model.weights import View, WeightSet

NAME, FILE = "v00000001-inc1", "model.safetensors"


def test_tensor_when_larger_than_a_range_may_be_then_pulled_in_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(giving, "MAX_CHUNK_BYTES", 1001)
    monkeypatch.setattr(sources, "CHUNK_BYTES", 1001)  # ends within an item, and within a row
    stored = torch.randn(24, 200).t()  # transposed in memory, as projections are
    save_file({"wide": stored.contiguous()}, tmp_path / FILE)
    (tmp_path / "config.json").write_text("{}")
    layout = read_layout(tmp_path / FILE)
    data = stored.contiguous().view(-1).view(torch.uint8).numpy().data
    manifest = assemble_manifest(
        tmp_path,
        1,
        1,
        [WeightFile(FILE, layout.size_bytes, digest_of((tmp_path / FILE).read_bytes()))],
        [WeightTensor("wide", (200, 24), "F32", digest_of(data))],
    )
    weights = WeightSet(views={"wide": View(stored, (200, 24))})
    weights.published = sources.Published(NAME, manifest, {FILE: layout})
    route = Route("/versions/{name}/{file}", giving.Giving(lambda: [weights]).get)
    server = uvicorn.Server(uvicorn.Config(Starlette(routes=[route]), log_level="warning"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            url = f"http://127.0.0.1:{listener.getsockname()[1]}/versions/{NAME}"
            source = sources.StoreSource(url, {})
            assert bytes(source.read(source.tensors["wide"])) == bytes(data)
            source.close()
        finally:
            server.should_exit = True
            thread.join(30.0)
