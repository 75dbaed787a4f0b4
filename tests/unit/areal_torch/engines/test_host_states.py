"""A model's states leave the device and come back as they were, and no one notices."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.areal_torch.engines.train_fixtures import make_batch, weighted_loss

from areal.config.training import OptimizerConfig, TrainEngineConfig
from areal_torch.engines.fsdp import FSDPEngine
from areal_torch.engines.host_states import HostStates, states_of

CPU = torch.device("cpu")
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3)), max_size=6
    )
)
def test_tensors_when_they_go_and_come_back_then_each_bit_is_the_same(kinds):
    tensors = [torch.randint(0, 2, shape).to(dtype) for dtype, shape in kinds]
    tensors += [tensor.view(-1)[1:] for tensor in tensors if tensor.numel() > 2]  # shared memory
    before = [tensor.clone() for tensor in tensors]
    states = HostStates(CPU)
    moved = states.to_host(tensors)
    assert moved == sum(tensor.nbytes for tensor in before[: len(kinds)])
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors)
    states.to_device()
    for tensor, expected in zip(tensors, before, strict=True):
        assert torch.equal(tensor, expected)


def test_states_when_moved_twice_then_the_same_host_memory_holds_them():
    states, weight = HostStates(CPU), torch.ones(1000)
    places = []
    for round_ in range(3):
        weight += round_
        states.to_host([weight])
        places.append(states._copies[0].host.data_ptr())
        assert states.to_host([weight]) == 0, "they are away already"
        states.to_device()
        states.to_device()
    assert len(set(places)) == 1
    assert weight.tolist() == [4.0] * 1000


def test_states_when_memory_is_of_another_device_or_not_torchs_then_it_stays(tmp_path):
    file = tmp_path / "weights"
    file.write_bytes(bytes(8))
    mapped = torch.from_file(str(file), shared=True, size=2, dtype=torch.float32)
    assert HostStates(CPU).to_host([mapped]) == 0
    assert HostStates(torch.device("cuda")).to_host([torch.ones(2)]) == 0, "it is offloaded"
    assert mapped.tolist() == [0.0, 0.0]


@pytest.fixture(params=["alone", "sharded", "bfloat16", "offload"])
def options(request):
    return {
        "alone": {},
        "sharded": {"fsdp_at_world_size_1": True},
        "bfloat16": {"dtype": "bfloat16"},
        "offload": {"offload": True},
    }[request.param]


def trained(model_dir, options, tmp_path, *, moves: bool) -> dict[str, torch.Tensor]:
    """Weights and moments after three steps, whose second half's gradients are moved, too."""
    config = TrainEngineConfig(path=str(model_dir), optimizer=OptimizerConfig(lr=1e-2), **options)
    engine = FSDPEngine(config)
    engine.initialize()

    def away() -> None:
        if moves:
            engine.to_host()
            model = engine._step.model  # `engine.model` would bring it back
            assert all(p.untyped_storage().nbytes() == 0 for p in map(_local, model.parameters()))

    try:
        for step in range(3):
            away()
            engine.accumulate(make_batch(), weighted_loss)
            away()
            engine.accumulate(make_batch(), weighted_loss)
            engine.apply()
            away()
            exported = dict(engine.iter_full_tensors())
            away()
            engine.save_checkpoint(tmp_path / f"{moves}-{step}")
        away()
        engine.load_checkpoint(tmp_path / f"{moves}-2")
        found = {f"exported.{name}": tensor for name, tensor in exported.items()}
        states = states_of(engine.model, engine.step.optimizer)
        return found | {str(i): _local(tensor).clone() for i, tensor in enumerate(states)}
    finally:
        engine.destroy()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def test_engine_when_its_states_leave_between_all_calls_then_it_trains_as_if_they_stayed(
    model_dir, options, tmp_path
):
    stayed = trained(model_dir, options, tmp_path, moves=False)
    moved = trained(model_dir, options, tmp_path, moves=True)
    assert stayed.keys() == moved.keys()
    for name, expected in stayed.items():
        assert torch.equal(moved[name], expected), name


def test_engine_when_an_export_runs_then_its_states_leave_after_they_were_gathered(
    model_dir, tmp_path
):
    engine = FSDPEngine(TrainEngineConfig(path=str(model_dir), optimizer=OptimizerConfig()))
    engine.to_host()  # before there is a model: nothing to move
    engine.initialize()
    used = []
    engine.before_use = lambda: used.append(None)
    try:
        expected = {name: tensor.clone() for name, tensor in engine.iter_full_tensors()}
        delivered = []
        done = engine.export(None, lambda tensors, _: delivered.extend(tensors))
        before = len(used)
        engine.to_host()
        assert len(used) == before, "moving is no use"
        done.result(60)
        for tensor in delivered:
            own = expected[tensor.name]
            assert bytes(tensor.data) == own.contiguous().view(torch.uint8).numpy().tobytes()
        assert engine.model is not None
        assert len(used) > before
    finally:
        engine.destroy()
