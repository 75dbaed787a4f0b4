"""Muon against torch's own, and against the singular value decomposition that it approximates."""

from __future__ import annotations

import pytest
import torch
from tests.unit.areal_torch.engines.hub_families import make_family
from tests.unit.areal_torch.engines.train_fixtures import make_batch, weighted_loss
from torch import nn

from areal.config.training import LoraConfig, OptimizerConfig, TrainEngineConfig
from areal.errors import ConfigError
from areal_torch.engines.fsdp import FSDPEngine
from areal_torch.engines.muon import MOMENTUM, MuonAdamW, orthogonal
from areal_torch.engines.optimizer import make_state
from areal_torch.engines.parallel.gradients import step_in_one_pass

OPTIONS = {"lr": 1e-2, "weight_decay": 0.1, "fused": True}


def make(*values, muon=True):
    parameters = [nn.Parameter(value.clone()) for value in values]
    made = MuonAdamW([{"params": parameters, "muon": muon}], **OPTIONS)
    make_state(made)
    return made, parameters


def take_step(made, parameters, gradients):
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    made.step()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("shape", [(24, 24), (8, 40), (40, 8), (3, 12, 20)])
def test_orthogonal_when_compared_with_singular_vectors_then_they_are_its_own(shape, seed):
    torch.manual_seed(seed)
    # Of a gradient, some singular values are much smaller than others.
    matrix = torch.randn(shape, dtype=torch.float64) ** 3
    u, values, vh = torch.linalg.svd(matrix, full_matrices=False)
    inside = u.mT @ orthogonal(matrix) @ vh.mT
    kept = values / values[..., :1] > 0.05
    diagonal = inside.diagonal(dim1=-2, dim2=-1)
    assert bool(((diagonal > 0.6) & (diagonal < 1.3))[kept].all()), diagonal
    beside = inside - torch.diag_embed(diagonal)
    assert float(beside.abs().max()) < 1e-6


@pytest.mark.parametrize("shape", [(24, 24), (8, 40), (40, 8)])
def test_steps_when_compared_with_torch_muon_then_equal_within_its_bfloat16(shape):
    torch.manual_seed(1)
    start = torch.randn(shape)
    ours, (mine,) = make(start)
    theirs = nn.Parameter(start.clone())
    torchs = torch.optim.Muon(
        [theirs], lr=1e-2, weight_decay=0.1, momentum=MOMENTUM, adjust_lr_fn="match_rms_adamw"
    )
    for _ in range(5):
        gradient = torch.randn(shape)
        take_step(ours, [mine], [gradient])
        take_step(torchs, [theirs], [gradient])
    moved = float((theirs.detach() - start).norm())
    assert float((mine - theirs).detach().norm()) < 0.02 * moved
    assert moved > 0.1


def test_step_when_experts_are_one_tensor_then_each_is_a_matrix_of_its_own():
    torch.manual_seed(2)
    start, gradient = torch.randn(3, 6, 10), torch.randn(3, 6, 10)
    together, (stacked,) = make(start)
    apart, single = make(*start)
    take_step(together, [stacked], [gradient])
    take_step(apart, single, list(gradient))
    for one, other in zip(stacked, single, strict=True):
        torch.testing.assert_close(one, other)


def test_step_in_one_pass_when_it_divides_or_skips_then_equals_a_step_of_divided_gradients():
    torch.manual_seed(3)
    values = [torch.randn(5, 7), torch.randn(3, 4, 4)]
    divided, expected = make(*values)
    at_once, ours = make(*values)
    for divisor, skip in ((4.0, False), (0.5, True), (8.0, False)):
        gradients = [torch.randn_like(value) for value in values]
        given = [each * float("inf") for each in gradients] if skip else gradients
        for parameter, gradient in zip(ours, given, strict=True):
            parameter.grad = gradient.clone()
        step_in_one_pass(at_once, torch.tensor(divisor), torch.tensor(skip))
        if not skip:
            take_step(divided, expected, [gradient / divisor for gradient in gradients])
        for mine, theirs in zip(ours, expected, strict=True):
            assert torch.equal(mine, theirs)
            assert all(
                torch.equal(at_once.state[mine][name], held)
                for name, held in divided.state[theirs].items()
            )


def test_other_parameters_when_stepped_then_they_are_those_of_adamw():
    torch.manual_seed(4)
    start, gradient = torch.randn(5, 7), torch.randn(5, 7)
    ours, (mine,) = make(start, muon=False)
    theirs = nn.Parameter(start.clone())
    adamw = torch.optim.AdamW([theirs], **OPTIONS)
    take_step(ours, [mine], [gradient])
    take_step(adamw, [theirs], [gradient])
    assert torch.equal(mine, theirs)


@pytest.fixture
def make_engine():
    engines = []

    def make(folder, **options):
        own = OptimizerConfig(type="muon", lr=3e-3)
        engine = FSDPEngine(TrainEngineConfig(path=str(folder), optimizer=own, **options))
        engine.initialize()
        engines.append(engine)
        return engine

    yield make
    for engine in reversed(engines):
        engine.destroy()


def names_of(engine, *, muon):
    found = {id(p): name for name, p in engine.model.hf.named_parameters()}
    groups = engine.step.optimizer.param_groups
    return {found[id(p)] for group in groups if group["muon"] is muon for p in group["params"]}


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_engine_when_muon_is_named_then_matrices_of_layers_have_one_moment(
    make_engine, tmp_path, kind
):
    engine = make_engine(make_family(kind, tmp_path / kind))
    matrices, others = names_of(engine, muon=True), names_of(engine, muon=False)
    shapes = {name: p.ndim for name, p in engine.model.hf.named_parameters()}
    assert "model.layers.0.self_attn.q_proj.weight" in matrices
    assert {"model.embed_tokens.weight", "model.norm.weight"} <= others
    assert all(".layers." in name and shapes[name] >= 2 for name in matrices)
    if kind == "qwen3_moe":
        assert "model.layers.0.mlp.experts.gate_up_proj" in matrices
        assert "model.layers.0.mlp.gate.weight" in others
    states = engine.step.optimizer.state
    for parameter in engine.model.hf.parameters():
        assert ("momentum_buffer" in states[parameter]) is ("exp_avg" not in states[parameter])
    batch = make_batch()
    batch["input_ids"] %= engine.model.vocab_size
    losses = [engine.train_batch(batch, weighted_loss)["loss"] for _ in range(10)]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("sharded", [False, True])
def test_checkpoint_when_muon_trains_then_resumes_bit_for_bit(
    make_engine, model_dir, tmp_path, sharded
):
    batches = [make_batch(seed) for seed in range(4)]
    engine = make_engine(model_dir, fsdp_at_world_size_1=sharded)
    for batch in batches[:2]:
        engine.train_batch(batch, weighted_loss)
    engine.save_checkpoint(tmp_path / "c")
    for batch in batches[2:]:
        engine.train_batch(batch, weighted_loss)
    expected = {name: tensor.clone() for name, tensor in engine.iter_full_tensors()}
    resumed = make_engine(model_dir, fsdp_at_world_size_1=sharded)
    resumed.load_checkpoint(tmp_path / "c")
    for batch in batches[2:]:
        resumed.train_batch(batch, weighted_loss)
    for name, tensor in resumed.iter_full_tensors():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize(
    ("own", "options", "named"),
    [
        ({}, {"lora": LoraConfig()}, r"actor\.lora: expected null"),
        ({}, {"offload": True}, r"actor\.offload: expected false"),
        ({"moments": "bfloat16"}, {}, r"actor\.optimizer\.moments: expected float32"),
    ],
)
def test_muon_when_a_setting_does_not_fit_then_it_is_named(own, options, named):
    config = TrainEngineConfig(path="x", optimizer=OptimizerConfig(type="muon", **own), **options)
    with pytest.raises(ConfigError, match=named):
        FSDPEngine(config)
