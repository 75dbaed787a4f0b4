"""How a server reads a version from a store: few requests, each tensor as it is."""

import math
from dataclasses import replace

import pytest
import torch
from tests.inference_server import make_model

from areal.weights.manifest import build_manifest
from areal_inference.model import sources
from areal_inference.model.config import ModelConfig
from areal_inference.model.weights import load_weights, model_shapes


@pytest.mark.parametrize("most", [None, 20_000])
def test_load_when_from_a_store_then_neighbors_come_with_one_request(tmp_path, monkeypatch, most):
    folder = tmp_path / "model"
    make_model(folder)
    manifest = replace(build_manifest(folder, 3, 1), path="")
    asked = []

    class Store:
        def manifest(self, name):
            return manifest

        def read_into(self, name, file, offset, target):
            asked.append(target.nbytes)
            target[:] = (folder / file).read_bytes()[offset : offset + target.nbytes]

        def close(self):
            pass

    monkeypatch.setattr(sources, "open_remote", lambda location, headers: (Store(), "v"))
    if most is not None:
        monkeypatch.setattr(sources, "CHUNK_BYTES", most)
    config = ModelConfig.from_folder(folder)
    ours = load_weights("http://store/versions/v00000003-inc1", config, torch.float32)
    expected = load_weights(str(folder), config, torch.float32)
    assert ours.checksums() == expected.checksums()
    weights = sum(f.size_bytes for f in manifest.files[1:])
    if most is None:
        assert len(asked) == 3, "the header's length, the header, the tensors"
    else:
        sizes = [4 * math.prod(shape) for shape in model_shapes(config).values()]
        assert any(size > most for size in sizes), "one tensor needs several requests"
        assert 3 < len(asked) < sum(math.ceil(size / most) for size in sizes)
        assert max(asked) <= most
    assert sum(asked) - 8 == weights, "no byte comes twice"
