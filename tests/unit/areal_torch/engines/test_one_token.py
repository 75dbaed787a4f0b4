"""Sequences of one token: nothing precedes it, so it is in no loss; but it may be all there is."""

import pytest
import torch
from tests.unit.areal_torch.engines.train_fixtures import (
    assert_gradients_close,
    gradients,
    make_batch,
    weighted_loss,
)

from areal.config.training import MicroBatchSpec, OptimizerConfig, TrainEngineConfig
from areal.errors import InvalidInput
from areal_torch.algorithms import packing
from areal_torch.engines.fsdp import FSDPEngine

ONE = {"input_ids": [3], "loss_mask": [False]}


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


@pytest.mark.parametrize("options", [{}, {"share_prefixes": False}, {"fsdp_at_world_size_1": True}])
def test_engine_when_a_sequence_of_one_token_is_all_there_is_then_learns_nothing(
    make_engine, options
):
    engine = make_engine(**options)
    before = dict(engine.iter_full_tensors())
    batch = packing.pack([ONE])
    assert engine.forward(batch).tolist() == [0.0]
    stats = engine.train_batch(batch, weighted_loss)
    assert (stats["loss"], stats["n_loss_tokens"], stats["n_tokens"]) == (0.0, 0.0, 1.0)
    assert stats["grad_norm"] == 0.0
    for name, tensor in engine.iter_full_tensors():
        assert torch.equal(tensor, before[name])


@pytest.mark.parametrize("budget", [1, 1000])
def test_gradients_when_sequences_of_one_token_are_among_others_then_they_change_nothing(
    make_engine, budget
):
    engine = make_engine(dtype="float64", mb_spec=MicroBatchSpec(max_tokens_per_mb=budget))
    batch = make_batch(groups=2)
    expected, stats = gradients(engine, batch)
    ones = [{key: value[:1] for key, value in s.items()} for s in packing.unpack(batch)[:2]]
    mixed = packing.pack([ones[0], *packing.unpack(batch), ones[1]])
    ours, our_stats = gradients(engine, mixed)
    assert_gradients_close(ours, expected, 1e-12)
    assert our_stats["n_loss_tokens"] == stats["n_loss_tokens"]
    logprobs = engine.forward(mixed)
    torch.testing.assert_close(logprobs[1:-1], engine.forward(batch), rtol=1e-9, atol=1e-12)
    assert logprobs[[0, -1]].tolist() == [0.0, 0.0]


def test_engine_when_a_first_token_is_in_the_loss_then_refused_in_one_line(make_engine):
    engine = make_engine()
    batch = packing.pack([{"input_ids": [3], "loss_mask": [True]}])
    said = r"^batch\['loss_mask'\] is true on a sequence's first token: expected false[^\n]*$"
    with pytest.raises(InvalidInput, match=said):
        engine.forward(batch)
    with pytest.raises(InvalidInput, match=said):
        engine.train_batch(batch, weighted_loss)
