"""AdamW with bfloat16 moments against AdamW with float32 moments."""

from __future__ import annotations

import pytest
import torch
from tests.unit.areal_torch.engines.train_fixtures import make_batch, weighted_loss
from torch import nn

from areal.config.training import OptimizerConfig, TrainEngineConfig
from areal_torch.engines import optimizer
from areal_torch.engines.fsdp import FSDPEngine
from areal_torch.engines.optimizer import RoundedAdamW, make_state, round_stochastic_
from areal_torch.engines.parallel.gradients import step_in_one_pass

OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.999), "weight_decay": 0.01, "fused": True}


def make(kind, *values):
    parameters = [nn.Parameter(value.clone()) for value in values]
    made = kind(parameters, **OPTIONS)
    make_state(made)
    return made, parameters


def take_step(made, parameters, gradients):
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    made.step()


def test_rounding_when_repeated_then_its_mean_is_the_value():
    torch.manual_seed(0)
    values = torch.randn(64) * 10.0 ** torch.randint(-20, 20, (64,))
    tries = 1 << 14
    rounded = round_stochastic_(values.expand(tries, 64).contiguous())
    assert rounded.dtype == torch.bfloat16
    assert all(len(column.unique()) == 2 for column in rounded.T)
    distance = rounded.max(0).values.double() - rounded.min(0).values.double()
    assert bool((distance <= values.double().abs() * 2**-7).all())
    error = (rounded.double().mean(0) - values.double()).abs()
    # A standard deviation of at most half the distance, and 64 values: six of them are never seen.
    assert bool((error < 6 * 0.5 * distance / tries**0.5).all())


def test_rounding_when_bfloat16_has_the_value_then_keeps_it():
    values = torch.tensor([0.0, -0.0, 1.0, -3.5, 2.0**-130, 2.0**120])
    assert torch.equal(round_stochastic_(values.clone()).float(), values)


def test_moments_when_many_elements_are_updated_then_their_mean_is_that_of_float32():
    """The second moment falls by 1/1000 of itself a step: rounding to nearest would stop it."""
    torch.manual_seed(1)
    copies = 1 << 14
    rounded, mine = make(RoundedAdamW, torch.zeros(copies))
    exact, theirs = make(torch.optim.AdamW, torch.zeros(copies))
    for gradient in [3.0, *[0.01] * 200]:
        for each, parameters in ((rounded, mine), (exact, theirs)):
            take_step(each, parameters, [torch.full((copies,), gradient)])
    ours, expected = rounded.state[mine[0]], exact.state[theirs[0]]
    assert ours["exp_avg_sq"].dtype == torch.bfloat16
    for name in ("exp_avg", "exp_avg_sq"):
        mean = float(ours[name].double().mean())
        assert mean == pytest.approx(float(expected[name][0]), rel=2e-3), name
    ours, expected = mine[0].detach().mean(), theirs[0].detach()[0]
    assert float(ours) == pytest.approx(float(expected), rel=2e-3)
    first = 0.001 * 3.0**2
    assert first * 0.999 > first * (1 - 2**-9), "to nearest, the second moment would never fall"


def test_rounded_adamw_when_it_learns_then_as_well_as_float32():
    torch.manual_seed(2)
    inputs = torch.randn(512, 32)
    outputs = inputs @ torch.randn(32, 4) + 0.1 * torch.randn(512, 4)

    def loss_of(kind):
        made, (weight,) = make(kind, torch.zeros(32, 4))
        for step in range(400):
            rows = slice(step * 32 % 512, step * 32 % 512 + 32)
            error = inputs[rows] @ weight - outputs[rows]
            take_step(made, [weight], torch.autograd.grad(error.square().mean(), weight))
        return float((inputs @ weight.detach() - outputs).square().mean())

    exact = loss_of(torch.optim.AdamW)
    assert exact < 0.1 * float(outputs.square().mean())
    assert loss_of(RoundedAdamW) < 1.05 * exact


def test_rounded_adamw_when_tensors_are_cut_then_the_result_is_the_same(monkeypatch):
    monkeypatch.setattr(optimizer, "round_stochastic_", lambda exact: exact.to(torch.bfloat16))
    torch.manual_seed(3)
    values = [torch.randn(5, 7), torch.randn(3), torch.randn(20)]
    whole, expected = make(RoundedAdamW, *values)
    cut, ours = make(RoundedAdamW, *values)
    for _ in range(3):
        gradients = [torch.randn_like(value) for value in values]
        monkeypatch.setattr(optimizer, "PIECE", 1 << 25)
        take_step(whole, expected, gradients)
        monkeypatch.setattr(optimizer, "PIECE", 8)
        take_step(cut, ours, gradients)
    for mine, theirs in zip(ours, expected, strict=True):
        assert torch.equal(mine, theirs)
        assert float(cut.state[mine]["step"]) == 3


@pytest.mark.parametrize("kind", [torch.optim.AdamW, RoundedAdamW])
def test_step_in_one_pass_when_it_divides_then_equals_a_step_of_divided_gradients(
    monkeypatch, kind
):
    monkeypatch.setattr(optimizer, "round_stochastic_", lambda exact: exact.to(torch.bfloat16))
    monkeypatch.setattr(optimizer, "PIECE", 8)
    torch.manual_seed(4)
    values = [torch.randn(5, 7), torch.randn(3)]
    divided, expected = make(kind, *values)
    at_once, ours = make(kind, *values)
    for divisor, skip in ((4.0, False), (0.5, True), (8.0, False)):
        gradients = [torch.randn_like(value) for value in values]
        for parameter, gradient in zip(ours, gradients, strict=True):
            parameter.grad = gradient.clone()
        step_in_one_pass(at_once, torch.tensor(divisor), torch.tensor(skip))
        if not skip:
            take_step(divided, expected, [gradient / divisor for gradient in gradients])
        for mine, theirs in zip(ours, expected, strict=True):
            assert torch.equal(mine, theirs)
            for name, held in divided.state[theirs].items():
                assert torch.equal(at_once.state[mine][name], held), name


@pytest.fixture
def make_engine(model_dir):
    engines = []

    def make(**options):
        own = OptimizerConfig(lr=1e-2, moments="bfloat16")
        engine = FSDPEngine(TrainEngineConfig(path=str(model_dir), optimizer=own, **options))
        engine.initialize()
        engines.append(engine)
        return engine

    yield make
    for engine in reversed(engines):
        engine.destroy()


@pytest.mark.parametrize("sharded", [False, True])
def test_checkpoint_when_moments_are_bfloat16_then_resumes_bit_for_bit(
    make_engine, tmp_path, sharded
):
    batches = [make_batch(seed) for seed in range(4)]
    engine = make_engine(fsdp_at_world_size_1=sharded)
    for batch in batches[:2]:
        engine.train_batch(batch, weighted_loss)
    engine.save_checkpoint(tmp_path / "c")
    moments = {s["exp_avg_sq"].dtype for s in engine.step.optimizer.state.values()}
    assert moments == {torch.bfloat16}
    for batch in batches[2:]:
        engine.train_batch(batch, weighted_loss)
    expected = {name: tensor.clone() for name, tensor in engine.iter_full_tensors()}
    resumed = make_engine(fsdp_at_world_size_1=sharded)
    resumed.load_checkpoint(tmp_path / "c")
    for batch in batches[2:]:
        resumed.train_batch(batch, weighted_loss)
    for name, tensor in resumed.iter_full_tensors():
        assert torch.equal(tensor, expected[name]), name


def test_train_batch_when_the_gradient_is_not_finite_then_rounded_moments_stay(make_engine):
    engine = make_engine()
    engine.train_batch(make_batch(), weighted_loss)
    states = engine.step.optimizer.state.values()
    before = [{name: value.clone() for name, value in state.items()} for state in states]
    stats = engine.train_batch(make_batch(), lambda p, *_: ((p * float("inf")).sum(), {}))
    assert stats["skipped_steps"] == 1.0
    for state, held in zip(states, before, strict=True):
        assert all(torch.equal(state[name], held[name]) for name in held)
