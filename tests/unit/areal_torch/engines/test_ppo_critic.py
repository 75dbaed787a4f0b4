"""The critic on its engine: values, its loss, its statistics, its place in a checkpoint."""

import pytest
import torch
from tests.unit.areal_torch.engines.train_fixtures import make_batch

from areal.config.training import (
    CriticConfig,
    LoraConfig,
    MicroBatchSpec,
    OptimizerConfig,
    PPOActorConfig,
)
from areal.errors import InvalidInput
from areal_torch.algorithms import packing
from areal_torch.engines.fsdp import FSDPEngine
from areal_torch.engines.model.heads import ScalarHead
from areal_torch.engines.ppo import PPOActor
from areal_torch.engines.ppo_value import PPOCritic


@pytest.fixture
def make(model_dir):
    """An actor and its critic."""
    engines = []

    def pair(lr=1e-2, total_train_steps=None, **options):
        optimizer = OptimizerConfig(
            lr=1e-3, weight_decay=0.0, warmup_steps_proportion=0.0, lr_scheduler_type="linear"
        )
        config = PPOActorConfig(
            path=str(model_dir), optimizer=optimizer, adv_norm=None, critic=True, **options
        )
        for settings in (config, CriticConfig(lr=lr).engine(config)):
            engine = FSDPEngine(settings)
            engine.initialize(total_train_steps)
            engine.set_version(4)
            engines.append(engine)
        actor_engine, critic_engine = engines[-2:]
        actor_engine.attach("critic", critic_engine)
        return PPOActor(config, actor_engine), PPOCritic(critic_engine, config.ppo_n_minibatches)

    yield pair
    for engine in reversed(engines):
        engine.destroy()


def give_head(critic, seed=0):
    """A head that says something: a fresh one says 0."""
    weight = critic.engine.model.hf.score.weight
    torch.nn.init.normal_(weight, std=0.3, generator=torch.Generator().manual_seed(seed))


def ready(actor, critic, seed=0, **keys):
    batch = make_batch(seed, **keys)
    batch["values"] = critic.compute_values(batch)
    actor.compute_advantages(batch)
    return batch


def step(actor, critic, seed):
    batch = ready(actor, critic, seed)
    return actor.ppo_update(batch), critic.ppo_update(batch)


def test_values_when_turns_have_tool_tokens_between_then_sampled_tokens_alone_have_one(make):
    actor, critic = make(gae_lambda=0.9)
    give_head(critic)
    batch = ready(actor, critic)
    mask, values = batch["loss_mask"], batch["values"]
    assert not values[~mask].any()
    assert values[mask].all()
    for sequence in packing.unpack(batch):
        own, inside = sequence["values"].double(), sequence["loss_mask"]
        v, total, gains = own[inside].tolist(), 0.0, []
        rewards = [0.0] * (len(v) - 1) + [float(sequence["rewards"].sum())]
        for t in reversed(range(len(v))):
            following = v[t + 1] if t + 1 < len(v) else 0.0
            total = rewards[t] + following - v[t] + 0.9 * total
            gains.insert(0, total)
        assert sequence["advantages"][inside].tolist() == pytest.approx(gains, abs=1e-5)
        returns = [gain + value for gain, value in zip(gains, v, strict=True)]
        assert sequence["returns"][inside].tolist() == pytest.approx(returns, abs=1e-5)


@pytest.mark.parametrize("options", [{}, {"mb_spec": MicroBatchSpec(max_tokens_per_mb=40)}])
def test_advantages_when_answers_were_cut_off_then_the_value_after_them_counts(make, options):
    actor, critic = make(gae_lambda=0.9, **options)
    give_head(critic)
    batch = make_batch(0)
    plain = critic.compute_values(batch)
    assert "bootstrap_values" not in batch
    batch["truncated"] = torch.arange(len(batch["cu_seqlens"]) - 1) % 2 == 0
    batch["values"] = critic.compute_values(batch)
    assert torch.equal(batch["values"], plain)
    actor.compute_advantages(batch)
    for index, sequence in enumerate(packing.unpack(batch)):
        # The value of what the answer came to: that of one more token after it.
        longer = packing.pack(
            [
                {
                    "input_ids": [*sequence["input_ids"].tolist(), 65],
                    "loss_mask": [False] * len(sequence["input_ids"]) + [True],
                }
            ]
        )
        after = float(critic.engine.forward(longer, ScalarHead())[-1]) if index % 2 == 0 else 0.0
        assert float(batch["bootstrap_values"][index]) == pytest.approx(after, abs=1e-5)
        inside = sequence["loss_mask"]
        v, total, gains = sequence["values"].double()[inside].tolist(), 0.0, []
        rewards = [0.0] * (len(v) - 1) + [float(sequence["rewards"].sum())]
        for t in reversed(range(len(v))):
            following = v[t + 1] if t + 1 < len(v) else after
            total = rewards[t] + following - v[t] + 0.9 * total
            gains.insert(0, total)
        assert sequence["advantages"][inside].tolist() == pytest.approx(gains, abs=1e-5)
    critic.ppo_update(batch)
    batch["truncated"][:] = False
    critic.compute_values(batch)
    assert not batch["bootstrap_values"].any()


def test_values_when_a_prompt_has_one_token_and_the_answer_is_cut_off_then_bootstrapped(make):
    _, critic = make()
    give_head(critic)
    rows = [
        {"input_ids": [65, 66], "loss_mask": [False, True]},
        {"input_ids": [65], "loss_mask": [False]},
    ]
    batch = {**packing.pack(rows), "truncated": torch.tensor([True, True])}
    assert critic.compute_values(batch)[1] != 0.0
    assert (batch["bootstrap_values"] != 0.0).tolist() == [True, False]


def test_update_when_reported_then_says_how_much_of_the_returns_values_foresaw(make):
    actor, critic = make(dtype="float64")
    give_head(critic)
    batch = ready(actor, critic)
    mask = batch["loss_mask"]
    values, returns = batch["values"][mask], batch["returns"][mask]
    stats = critic.ppo_update(batch)
    foreseen = 1 - (returns - values).var(correction=0) / returns.var(correction=0)
    assert stats["explained_variance"] == pytest.approx(float(foreseen), rel=1e-6)
    assert stats["loss"] == pytest.approx(float((values - returns).square().mean() / 2), rel=1e-6)
    assert stats["value"] == pytest.approx(float(values.mean()), rel=1e-6)
    assert stats["return"] == pytest.approx(float(returns.mean()), rel=1e-6)
    assert stats["clip_ratio"] == 0.0
    assert "entropy" not in stats


def test_update_when_repeated_then_the_values_foresee_the_returns(make):
    actor, critic = make(lr=5e-3)
    batch = ready(actor, critic)
    first = critic.ppo_update(batch)
    assert first["explained_variance"] == pytest.approx(0.0, abs=1e-6)
    for _ in range(60):
        batch["values"] = critic.compute_values(batch)
        last = critic.ppo_update(batch)
    assert last["explained_variance"] > 0.8


def test_update_when_several_minibatches_then_values_move_no_further_than_the_clip(make):
    actor, critic = make(lr=0.1, ppo_n_minibatches=4)
    batch = ready(actor, critic)
    batch["returns"] = 5.0 * batch["loss_mask"]  # far above: all values must rise
    stats = critic.ppo_update(batch)
    assert critic.engine.step.steps_taken == 4
    assert stats["clip_ratio"] > 0.0


def test_update_when_micro_batches_are_small_then_the_same(make):
    found = []
    for spec in (MicroBatchSpec(), MicroBatchSpec(max_tokens_per_mb=40)):
        actor, critic = make(dtype="float64", mb_spec=spec)
        give_head(critic)
        stats = critic.ppo_update(ready(actor, critic))
        found.append((stats["loss"], stats["grad_norm"], stats["explained_variance"]))
    assert found[0] == pytest.approx(found[1], rel=1e-9)


@pytest.mark.parametrize("name", ["values", "returns"])
def test_update_when_the_batch_is_not_ready_then_refused_in_one_line(make, name):
    actor, critic = make()
    batch = ready(actor, critic)
    del batch[name]
    with pytest.raises(InvalidInput, match=rf"^batch has no '{name}': expected compute_"):
        critic.ppo_update(batch)


def test_lora_when_it_is_of_the_actor_then_the_critic_learns_by_adapters_and_its_head(make):
    actor, critic = make(lora=LoraConfig(rank=4))
    frozen, first = {}, {}
    for name, parameter in critic.engine.model.named_parameters():
        (first if parameter.requires_grad else frozen)[name] = parameter.detach().clone()
    assert all(".lora_" in name or ".score." in name for name in first)
    assert any(".score." in name for name in first)
    batch = ready(actor, critic)
    for _ in range(60):
        batch["values"] = critic.compute_values(batch)
        last = critic.ppo_update(batch)
    assert last["explained_variance"] > 0.5
    now = dict(critic.engine.model.named_parameters())
    assert all(torch.equal(now[name], tensor) for name, tensor in frozen.items())
    moved = [name for name, tensor in first.items() if not torch.equal(now[name], tensor)]
    assert len(moved) > len(first) / 2


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4)])
def test_checkpoint_when_resumed_then_actor_and_critic_continue_to_the_bit(make, tmp_path, lora):
    actor, critic = make(ppo_n_minibatches=2, lora=lora)
    step(actor, critic, 0)
    actor.engine.save_checkpoint(tmp_path, background=True).result(timeout=60)
    expected = [step(actor, critic, seed) for seed in (1, 2)]
    again, its_critic = make(ppo_n_minibatches=2, lora=lora)
    again.engine.load_checkpoint(tmp_path)
    again.engine.load_attached("critic", tmp_path)
    assert its_critic.engine.step.steps_taken == 2
    found = [step(again, its_critic, seed) for seed in (1, 2)]
    for theirs, ours in zip(expected, found, strict=True):
        for before, after in zip(theirs, ours, strict=True):
            for name in ("loss", "grad_norm", "lr"):
                assert before[name] == after[name], name
    for first, second in ((actor, again), (critic, its_critic)):
        pairs = zip(first.engine.model.parameters(), second.engine.model.parameters(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


def test_checkpoint_when_the_critic_warmed_up_then_each_resumes_its_own_learning_rate(
    make, tmp_path
):
    actor, critic = make(total_train_steps=10)
    batch = ready(actor, critic)
    for _ in range(3):
        critic.ppo_update(batch)
    actor.ppo_update(batch)
    actor.engine.save_checkpoint(tmp_path)
    again, its_critic = make(total_train_steps=10)
    again.engine.load_checkpoint(tmp_path)
    again.engine.load_attached("critic", tmp_path)
    # Both rates fall from their peak to 0 in 10 steps.
    assert again.ppo_update(batch)["lr"] == pytest.approx(1e-3 * 9 / 10)
    assert its_critic.ppo_update(batch)["lr"] == pytest.approx(1e-2 * 7 / 10)
    assert (again.engine.step.steps_taken, its_critic.engine.step.steps_taken) == (2, 4)


def test_checkpoint_when_it_was_made_without_a_critic_then_refused_in_one_line(make, tmp_path):
    actor, _ = make()
    actor.engine._attached.clear()
    actor.engine.save_checkpoint(tmp_path).result()
    again, _ = make()
    again.engine.load_checkpoint(tmp_path)
    with pytest.raises(InvalidInput, match=r"has no tensor 'critic\.model\."):
        again.engine.load_attached("critic", tmp_path)
