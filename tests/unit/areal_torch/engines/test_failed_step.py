"""Steps whose gradient is not finite: told, counted, ended, kept, and taken again."""

import json
import math

import pytest
import torch
from tests.unit.areal_torch.engines.train_fixtures import make_batch, weighted_loss

from areal.config.training import OptimizerConfig, PPOActorConfig, TrainEngineConfig
from areal.errors import ConfigError, InvalidInput, TrainingDiverged
from areal_torch.algorithms import packing
from areal_torch.engines import failed_step, finite
from areal_torch.engines.fsdp import FSDPEngine
from areal_torch.engines.ppo import PPOActor


@pytest.fixture
def make_actor(model_dir):
    engines = []

    def make(**options):
        options.setdefault("optimizer", OptimizerConfig(lr=1e-3))
        config = PPOActorConfig(path=str(model_dir), **options)
        engine = FSDPEngine(config)
        engine.initialize()
        engines.append(engine)
        return PPOActor(config, engine)

    yield make
    for engine in reversed(engines):
        engine.destroy()


def broken(logprobs, entropies, batch):
    return logprobs.sum() * math.inf, {}


def infinite_slope(logprobs, entropies, batch):
    """A loss of 0 with the derivative of a root at 0."""
    return (logprobs * 0.0).clamp(min=0.0).sqrt().sum(), {}


def poisoned(actor, tokens=2, key="advantages"):
    batch = make_batch(groups=3)
    actor.compute_advantages(batch)
    chosen = torch.nonzero(batch["loss_mask"])[-tokens:]
    batch[key][chosen] = torch.nan
    return batch


def test_train_batch_when_steps_in_a_row_are_not_finite_then_the_third_ends_training(make_actor):
    engine = make_actor().engine
    batch, before = make_batch(), dict(engine.iter_full_tensors())
    for _ in range(2):
        assert engine.train_batch(batch, broken)["skipped_steps"] == 1.0
    said = (
        "^3 optimizer steps in a row had a gradient that is not finite: "
        r"rank 0: the loss is -inf, but its inputs and logprobs are finite$"
    )
    with pytest.raises(TrainingDiverged, match=said) as caught:
        engine.train_batch(batch, broken)
    assert caught.value.batch is batch
    for name, tensor in engine.iter_full_tensors():
        assert torch.equal(tensor, before[name])


def test_train_batch_when_a_healthy_step_is_between_then_counts_from_there(make_actor):
    engine = make_actor().engine
    nothing = make_batch()
    nothing["loss_mask"] = torch.zeros_like(nothing["loss_mask"])
    for _ in range(3):
        engine.train_batch(make_batch(), broken)
        engine.train_batch(make_batch(), broken)
        assert engine.train_batch(make_batch(), weighted_loss)["skipped_steps"] == 0.0
    # A step with nothing to learn is neither finite nor not.
    engine.train_batch(make_batch(), broken)
    for _ in range(4):
        assert engine.train_batch(nothing, weighted_loss)["skipped_steps"] == 1.0
    engine.train_batch(make_batch(), broken)
    with pytest.raises(TrainingDiverged):
        engine.train_batch(make_batch(), broken)


def test_ppo_update_when_minibatches_are_not_finite_then_each_is_a_step(make_actor):
    actor = make_actor(
        ppo_n_minibatches=3, optimizer=OptimizerConfig(max_skipped_steps=2), adv_norm=None
    )
    batch = poisoned(actor, tokens=len(make_batch(groups=3)["input_ids"]))
    with pytest.raises(TrainingDiverged, match=r"^2 optimizer steps in a row"):
        actor.ppo_update(batch)


@pytest.mark.parametrize("key", ["advantages", "behavior_logprobs", "proximal_logprobs"])
def test_cause_when_an_input_is_not_finite_then_named_with_its_groups(make_actor, key):
    actor = make_actor(optimizer=OptimizerConfig(max_skipped_steps=1))
    batch = make_batch(groups=3)
    actor.compute_advantages(batch)
    batch["proximal_logprobs"] = actor.compute_logprobs(batch)
    batch[key][torch.nonzero(batch["loss_mask"])[-2:]] = torch.nan
    with pytest.raises(TrainingDiverged) as caught:
        actor.take_step(batch)
    total = int(batch["loss_mask"].sum())
    assert caught.value.cause == f"rank 0: {key} are not finite (2 of {total})"
    assert caught.value.groups == (2,)


def test_cause_when_rewards_are_not_finite_then_they_are_to_blame_for_the_advantages(make_actor):
    actor = make_actor(optimizer=OptimizerConfig(max_skipped_steps=1))
    batch = make_batch(groups=3)
    batch["rewards"][int(batch["cu_seqlens"][1]) - 1] = torch.nan
    actor.compute_advantages(batch)
    with pytest.raises(TrainingDiverged) as caught:
        actor.ppo_update(batch)
    assert caught.value.cause.startswith("rank 0: rewards are not finite (1 of ")
    assert 0 in caught.value.groups


def test_cause_when_the_model_is_broken_then_its_logprobs_are_named(make_actor):
    engine = make_actor(optimizer=OptimizerConfig(max_skipped_steps=1)).engine
    with torch.no_grad():
        engine.model.hf.get_output_embeddings().weight[5, 0] = torch.nan
    batch = make_batch()
    tokens = int(batch["loss_mask"].sum())
    said = rf"rank 0: the policy's logprobs are not finite \({tokens} of {tokens}\)$"
    with pytest.raises(TrainingDiverged, match=said):
        engine.train_batch(batch, weighted_loss)


def test_cause_when_only_the_gradient_is_not_finite_then_says_that_all_else_is(make_actor):
    engine = make_actor(optimizer=OptimizerConfig(max_skipped_steps=1)).engine
    said = "the gradient norm is nan, while losses, logprobs and inputs are finite on all 1 ranks$"
    with pytest.raises(TrainingDiverged, match=said):
        engine.train_batch(make_batch(), infinite_slope)


def test_failed_batch_when_saved_then_loads_and_the_replay_finds_the_same_cause(
    make_actor, model_dir, tmp_path
):
    actor = make_actor(optimizer=OptimizerConfig(max_skipped_steps=1), eps_clip=0.3)
    with pytest.raises(TrainingDiverged) as caught:
        actor.ppo_update(poisoned(actor))
    error, folder = caught.value, tmp_path / "failed_step_7"
    info = {
        "step": 7,
        "policy_version": 6,
        "ranks": 1,
        "cause": error.cause,
        "actor": failed_step.settings_of(actor.config, actor.temperature),
    }
    where = failed_step.save_failed_batch(
        folder, error.batch, info, rank=0, tasks=["e0-4", "e0-5", "e0-9"], blamed=error.groups
    )
    assert where == f"its batch is in {folder} (not finite: tasks e0-9)"
    (batch,), read = failed_step.load_failed_batch(folder)
    assert read == {**json.loads(json.dumps(info)), "task_ids": [["e0-4", "e0-5", "e0-9"]]}
    assert batch.keys() == error.batch.keys()
    for key, tensor in error.batch.items():
        assert batch[key].dtype == tensor.dtype
        torch.testing.assert_close(batch[key], tensor, rtol=0, atol=0, equal_nan=True)
    actor.engine.destroy()
    assert failed_step.replay(folder, model_dir) == [error.cause]


def test_take_step_when_the_batch_has_what_all_ranks_chose_then_takes_it(make_actor):
    def step(**stored):
        actor = make_actor(
            loss_aggregation="sequence_mean",
            behavior_weight_mode="second_moment",
            behavior_weight_cap=100.0,
        )
        batch = make_batch(groups=3)
        actor.compute_advantages(batch)
        batch["proximal_logprobs"] = actor.compute_logprobs(batch)
        mask = batch["loss_mask"]
        return actor.take_step(batch | {key: value * mask for key, value in stored.items()})

    own = step()
    assert own["behavior_weight_capped_ratio"] == 0.0
    assert step(kept=torch.tensor(False))["behavior_weight_capped_ratio"] == 1.0
    one, two = (step(loss_weights=torch.tensor(w))["loss"] for w in (1.0, 2.0))
    assert two == pytest.approx(2 * one, rel=1e-5)
    assert own["loss"] != pytest.approx(one, rel=1e-3)


def test_failed_batch_when_the_disk_refuses_then_the_sentence_says_so(make_actor, tmp_path):
    actor = make_actor()
    (tmp_path / "file").write_text("")
    batch = poisoned(actor)
    said = failed_step.save_failed_batch(
        tmp_path / "file" / "failed_step_1", batch, {"ranks": 1}, rank=0, tasks=[], blamed=[]
    )
    assert said.startswith("its batch could not be saved: rank 0: ")
    assert "Not a directory" in said


def test_load_failed_batch_when_the_folder_is_not_one_then_refused_in_one_line(tmp_path):
    with pytest.raises(InvalidInput, match=r"^'[^\n]*nowhere': expected a complete failed_step"):
        failed_step.load_failed_batch(tmp_path / "nowhere")
    (tmp_path / "failure.json").write_text('{"ranks": 1}')
    (tmp_path / "rank_0.safetensors").write_bytes(b"torn")
    with pytest.raises(InvalidInput, match="complete"):
        failed_step.load_failed_batch(tmp_path)


def test_config_when_no_step_may_be_skipped_then_refused():
    config = TrainEngineConfig(optimizer=OptimizerConfig(max_skipped_steps=0))
    with pytest.raises(ConfigError, match=r"optimizer\.max_skipped_steps 0: expected more than 0"):
        FSDPEngine(config)


def test_find_cause_when_padding_off_the_mask_is_not_finite_then_is_not_blamed():
    batch = packing.pack(
        [
            {
                "input_ids": [1, 2, 3],
                "loss_mask": [False, True, True],
                "advantages": [math.nan, 1.0, 1.0],
                "rewards": [0.0, 0.0, 1.0],
            }
        ]
    )
    assert finite.find_cause(batch, 0, 1.0) == {"cause": "", "groups": []}
