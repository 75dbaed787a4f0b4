"""Models of text and images: text trains through their language tower, and nothing else changes."""

import pytest
import torch
from tests.unit.areal_torch.engines.hub_families import IMAGE, SEEING, make_family
from tests.unit.areal_torch.engines.model.test_self_test import alone
from tests.unit.areal_torch.engines.train_fixtures import make_batch, weighted_loss
from transformers import AutoModelForImageTextToText

from areal.config.training import OptimizerConfig, TrainEngineConfig
from areal.errors import InvalidInput
from areal_torch.algorithms import packing
from areal_torch.engines.fsdp import FSDPEngine


@pytest.fixture(params=SEEING)
def seeing(request, tmp_path):
    """An engine, and the same weights in plain transformers."""
    path = make_family(request.param, tmp_path)
    engine = FSDPEngine(
        TrainEngineConfig(
            path=str(path), dtype="float32", optimizer=OptimizerConfig(lr=1e-2, weight_decay=0.1)
        )
    )
    engine.initialize()
    eager = {"attn_implementation": "eager"}
    yield engine, AutoModelForImageTextToText.from_pretrained(path, **eager).eval()
    engine.destroy()


def test_forward_when_a_batch_is_text_then_equals_transformers(seeing):
    engine, hf = seeing
    batch = make_batch(vocabulary=IMAGE)
    torch.testing.assert_close(engine.forward(batch), alone(hf, batch), atol=4e-5, rtol=0)


def test_train_batch_when_a_batch_is_text_then_the_language_tower_alone_changes(seeing):
    engine, hf = seeing
    engine.train_batch(make_batch(vocabulary=IMAGE), weighted_loss)
    before = dict(hf.named_parameters())
    changed = {
        name for name, p in engine.model.hf.named_parameters() if not torch.equal(p, before[name])
    }
    assert changed
    assert not any("visual" in name for name in changed)
    assert len(changed) == sum("visual" not in name for name in before)


def test_forward_when_a_prompt_has_an_image_then_refuses(seeing):
    engine, _ = seeing
    batch = packing.pack([{"input_ids": [5, IMAGE, 7], "loss_mask": [False, False, True]}])
    with pytest.raises(
        InvalidInput, match=rf"token {IMAGE}, which stands for an image.*the batch has none"
    ):
        engine.forward(batch)
    sampled = packing.pack([{"input_ids": [5, 6, IMAGE], "loss_mask": [False, False, True]}])
    assert engine.forward(sampled)[2] < 0  # text to the server, too
