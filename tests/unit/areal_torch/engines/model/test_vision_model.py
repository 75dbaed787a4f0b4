"""Images in packed batches: against transformers' own forward pass of each sequence alone."""

import pytest
import torch
from tests.unit.areal_torch.engines.hub_families import IMAGE, SEEING, make_family
from tests.unit.areal_torch.engines.image_batches import image_batch
from tests.unit.areal_torch.engines.train_fixtures import (
    assert_gradients_close,
    gradients,
    weighted_loss,
)
from transformers import AutoModelForImageTextToText

from areal.config.training import LoraConfig, MicroBatchSpec, OptimizerConfig, TrainEngineConfig
from areal.errors import InvalidInput
from areal_torch.algorithms import packing
from areal_torch.engines.fsdp import FSDPEngine


@pytest.fixture(scope="module", params=sorted(SEEING))
def folder(request, tmp_path_factory):
    return str(make_family(request.param, tmp_path_factory.mktemp(request.param), seed=5))


def engine_of(folder, **options):
    optimizer = OptimizerConfig(lr=1e-2, weight_decay=0.0, gradient_clipping=0.0)
    engine = FSDPEngine(TrainEngineConfig(path=folder, optimizer=optimizer, **options))
    engine.initialize(total_train_steps=5)
    return engine


def alone(folder, batch):
    """transformers' model, and its logprobs of each sequence alone."""
    hf = AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    parts = []
    for number in range(len(batch["group_index"])):
        one = packing.select(batch, [number])
        ids, mask = one["input_ids"], one["loss_mask"]
        given = {}
        if len(one["image_group"]):
            given = {
                "pixel_values": one["pixel_values"],
                "image_grid_thw": one["image_grid_thw"],
                "mm_token_type_ids": (ids == IMAGE)[None].int(),
            }
        hf.model.rope_deltas = None
        logits = hf(input_ids=ids[None], use_cache=False, **given).logits[0, :-1]
        found = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        parts += [found.new_zeros(1), torch.where(mask[1:], found, 0.0)]
    return hf, torch.cat(parts)


@pytest.mark.parametrize("share_prefixes", [True, False])
def test_batch_when_groups_have_images_then_equals_transformers_to_the_tower(
    folder, share_prefixes
):
    batch = image_batch()
    engine = engine_of(folder, share_prefixes=share_prefixes)
    hf, expected = alone(folder, batch)
    torch.testing.assert_close(engine.forward(batch), expected.detach(), atol=1e-5, rtol=0)
    ours, stats = gradients(engine, batch)
    loss, _ = weighted_loss(expected, None, batch)
    (loss / batch["loss_mask"].sum()).backward()
    theirs = {f"hf.{name}": p.grad for name, p in hf.named_parameters()}
    tower = [name for name in theirs if "visual" in name and theirs[name].abs().max() > 0]
    assert len(tower) > 10
    assert_gradients_close(ours, theirs, 1e-5)
    only = [{name: each[name] for name in tower} for each in (ours, theirs)]
    assert_gradients_close(*only, 1e-5)
    assert stats["n_loss_tokens"] == int(batch["loss_mask"].sum())
    engine.destroy()


def test_batch_when_images_are_computed_in_bfloat16_then_differs_by_rounding(folder):
    batch = image_batch()
    engine = engine_of(folder, dtype="bfloat16")
    _, expected = alone(folder, batch)
    assert (engine.forward(batch) - expected.detach()).abs().mean() < 0.03
    assert 0 < engine.train_batch(batch, weighted_loss)["grad_norm"] < float("inf")
    engine.destroy()


def test_micro_batches_when_some_have_no_image_then_gradients_are_those_of_one(folder):
    batch = image_batch()
    whole, small = (
        engine_of(folder, mb_spec=MicroBatchSpec(max_tokens_per_mb=size)) for size in (1 << 14, 40)
    )
    expected, _ = gradients(whole, batch)
    found, stats = gradients(small, batch)
    assert stats["n_micro_batches"] > 3
    assert_gradients_close(found, expected, 1e-5)
    torch.testing.assert_close(small.forward(batch), whole.forward(batch), atol=1e-5, rtol=0)
    whole.destroy()
    small.destroy()


def test_lora_when_groups_have_images_then_adapters_of_the_decoder_alone_learn(folder):
    batch = image_batch()
    engine = engine_of(folder, lora=LoraConfig(rank=4))
    trained = {name for name, p in engine.model.named_parameters() if p.requires_grad}
    assert trained
    assert all(".lora_" in name and "visual" not in name for name in trained)
    before = {name: p.detach().clone() for name, p in engine.model.named_parameters()}
    losses = [engine.train_batch(batch, weighted_loss)["loss"] for _ in range(5)]
    assert losses[-1] < losses[0]
    now = dict(engine.model.named_parameters())
    assert {name for name, p in before.items() if not torch.equal(now[name], p)} == trained
    blind = {**batch, "pixel_values": torch.zeros_like(batch["pixel_values"])}
    assert not torch.allclose(engine.forward(batch), engine.forward(blind), atol=1e-4)
    engine.destroy()


def test_answer_when_it_has_an_image_token_then_it_is_text(folder):
    engine = engine_of(folder)
    weight = engine.model.hf.get_input_embeddings().weight
    with torch.no_grad():
        weight[70] = weight[IMAGE]
    batch, twin = image_batch(sampled=[IMAGE]), image_batch(sampled=[70])
    found, expected = engine.forward(batch), engine.forward(twin)
    others = batch["input_ids"] != IMAGE
    torch.testing.assert_close(found[others], expected[others], atol=1e-6, rtol=0)
    assert (found[~others & batch["loss_mask"]] < 0).all()
    engine.destroy()


def test_batch_when_its_images_are_wrong_then_is_refused_in_one_line(folder):
    engine, batch = engine_of(folder), image_batch()
    ids = batch["input_ids"].clone()
    ids[ids == IMAGE] = 5
    with pytest.raises(InvalidInput, match=r"has 0 tokens that stand for images: expected 4"):
        engine.forward({**batch, "input_ids": ids})
    fewer = {**batch, "pixel_values": batch["pixel_values"][1:]}
    with pytest.raises(InvalidInput, match=r"pixel_values.*expected \[80, D\], the patches of"):
        engine.forward(fewer)
    missing = {key: value for key, value in batch.items() if key != "image_group"}
    with pytest.raises(InvalidInput, match="expected image_group as well"):
        engine.forward(missing)
    engine.destroy()


def test_batch_when_the_model_sees_nothing_then_images_are_refused(tmp_path):
    engine = engine_of(str(make_family("qwen2", tmp_path)))
    with pytest.raises(InvalidInput, match="Qwen2ForCausalLM does not train with images: expected"):
        engine.forward(image_batch())
    engine.destroy()


@pytest.mark.parametrize("ranks_per_share", [2, 4])
def test_batch_when_ranks_share_its_tokens_then_images_are_refused(folder, ranks_per_share):
    engine = engine_of(folder)
    with pytest.raises(InvalidInput, match="an allocation_mode without t, c and e"):
        engine.model.check_images(image_batch(), ranks_per_share)
    engine.destroy()
