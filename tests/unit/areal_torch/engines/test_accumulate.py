"""Training commands one by one, what they cost, and memory that runs out."""

from __future__ import annotations

import pytest
import torch
from tests.unit.areal_torch.engines.train_fixtures import make_batch, weighted_loss

from areal.config.training import LoraConfig, MicroBatchSpec, OptimizerConfig, TrainEngineConfig
from areal.errors import CapacityExceeded, InvalidInput
from areal_torch.algorithms import packing
from areal_torch.engines import step
from areal_torch.engines.fsdp import FSDPEngine
from areal_torch.engines.perf import Work, peak_flops


@pytest.fixture
def make_engine(model_dir):
    engines = []

    def make(**options):
        options.setdefault("optimizer", OptimizerConfig(lr=1e-3))
        engine = FSDPEngine(TrainEngineConfig(path=str(model_dir), **options))
        engine.initialize()
        engines.append(engine)
        return engine

    yield make
    for engine in reversed(engines):
        engine.destroy()


def weights(engine):
    return [p.detach().clone() for p in engine.model.parameters()]


@pytest.mark.parametrize("sharded", [False, True])
def test_accumulate_when_a_batch_comes_in_parts_then_steps_as_one(make_engine, sharded):
    batch = make_batch(groups=4)
    options = {"dtype": "float64", "fsdp_at_world_size_1": sharded}
    whole, parts = (make_engine(optimizer=OptimizerConfig(lr=1e-2), **options) for _ in range(2))
    for _ in range(2):
        expected = whole.train_batch(batch, weighted_loss)
        for indices in packing.split_minibatches(batch, 3):
            parts.accumulate(packing.select(batch, indices), weighted_loss)
        stats = parts.apply()
        for name in ("loss", "grad_norm", "entropy", "n_tokens", "n_loss_tokens"):
            assert stats[name] == pytest.approx(expected[name], rel=1e-10)
        assert stats["n_micro_batches"] == 3
    for ours, theirs in zip(weights(parts), weights(whole), strict=True):
        full = [w.full_tensor() if sharded else w for w in (ours, theirs)]
        torch.testing.assert_close(*full, rtol=1e-9, atol=1e-10)


def test_apply_when_nothing_is_accumulated_then_says_so(make_engine):
    with pytest.raises(InvalidInput, match="nothing is accumulated"):
        make_engine().apply()


def test_accumulate_when_memory_runs_out_then_names_the_settings_and_drops_the_rest(make_engine):
    engine = make_engine()
    batch = make_batch()

    def greedy(*_):
        raise torch.OutOfMemoryError("tried to allocate 80 GiB")

    engine.accumulate(batch, weighted_loss)
    with pytest.raises(
        CapacityExceeded,
        match=r"estimated about 0\.\d GiB .*: expected "
        r"actor\.gradient_checkpointing=selective or full, or a smaller "
        r"actor\.mb_spec\.max_tokens_per_mb \(10240\), "
        r"or more ranks .*80 GiB",
    ):
        engine.accumulate(batch, greedy)
    assert all(p.grad is None for p in engine.model.parameters())
    with pytest.raises(InvalidInput, match="nothing is accumulated"):
        engine.apply()


def test_train_batch_when_done_then_says_what_it_cost(make_engine):
    engine = make_engine()
    stats = engine.train_batch(make_batch(), weighted_loss)
    parts = [stats[f"{name}_seconds"] for name in ("forward", "backward", "optimizer")]
    assert all(part > 0 for part in parts)
    assert sum(parts) <= stats["seconds"]
    assert stats["tokens_per_second"] == pytest.approx(stats["n_tokens"] / stats["seconds"])
    assert stats["peak_gib"] > 0.1
    assert "mfu" not in stats  # a CPU has no peak
    assert peak_flops(torch.device("cpu"), torch.bfloat16) is None


def test_train_batch_when_half_of_the_tokens_are_trained_then_the_head_counts_only_those(
    make_engine, monkeypatch
):
    peak = 1e12
    monkeypatch.setattr(step, "peak_flops", lambda *_: peak)
    rows = [{"input_ids": [65] * 8, "loss_mask": [at >= 4 for at in range(8)]}] * 6
    batch, engine = packing.pack(rows), make_engine(mb_spec=MicroBatchSpec(max_tokens_per_mb=16))
    stats = engine.train_batch(batch, weighted_loss)
    assert stats["n_loss_tokens"] == 24
    counted = stats["mfu"] * stats["seconds"] * peak
    work = engine.step.work
    assert counted == pytest.approx(work.flops(batch["cu_seqlens"], 24), rel=1e-9)


def test_work_when_a_model_is_dense_then_follows_the_formula(make_engine):
    hf = make_engine().model.hf
    config = hf.config
    kv = config.hidden_size * config.num_key_value_heads // config.num_attention_heads
    layer = 2 * config.hidden_size * (config.hidden_size + kv)
    layer += 3 * config.hidden_size * config.intermediate_size
    work = Work.of(hf)
    assert work.per_token == 6 * config.num_hidden_layers * layer
    assert work.per_loss_token == 6 * config.vocab_size * config.hidden_size
    assert work.per_pair == 6 * config.num_hidden_layers * config.hidden_size
    expected = 5 * work.per_token + 13 * work.per_pair + 2 * work.per_loss_token
    assert work.flops(torch.tensor([0, 3, 5]), 2) == expected


def test_work_when_only_adapters_are_trained_then_frozen_matrices_cost_two_thirds(make_engine):
    plain = Work.of(make_engine().model.hf)
    hf = make_engine(lora=LoraConfig(rank=4)).model.hf
    adapters = sum(p.numel() for name, p in hf.named_parameters() if ".lora_" in name)
    assert adapters > 0
    work = Work.of(hf)
    assert work.per_token == pytest.approx(plain.per_token * 4 / 6 + 6 * adapters)
    assert work.per_loss_token == plain.per_loss_token * 4 / 6
    assert work.per_pair == plain.per_pair
