import math
import statistics

import pytest
import torch
from tests.unit.areal_torch.engines.train_fixtures import (
    assert_gradients_close,
    gradients,
    make_batch,
)

from areal.config.presets import PRESETS
from areal.config.training import MicroBatchSpec, OptimizerConfig, PPOActorConfig
from areal.errors import InvalidInput
from areal_torch.algorithms import packing
from areal_torch.engines.fsdp import FSDPEngine
from areal_torch.engines.ppo import PPOActor
from areal_torch.engines.ppo_actor import FSDPPPOActor


@pytest.fixture
def make_actor(model_dir):
    engines = []

    def make(**options):
        options.setdefault("optimizer", OptimizerConfig(lr=1e-3))
        options.setdefault("reward_norm", "group/group")
        config = PPOActorConfig(path=str(model_dir), **options)
        engine = FSDPEngine(config)
        engine.initialize()
        engine.set_version(4)
        engines.append(engine)
        return PPOActor(config, engine)

    yield make
    for engine in reversed(engines):
        engine.destroy()


def ready_batch(actor, seed=0, **keys):
    batch = make_batch(seed, **keys)
    actor.compute_advantages(batch)
    return batch


def test_ppo_update_when_single_minibatch_then_shares_the_proximal_forward_exactly(make_actor):
    actor = make_actor(mb_spec=MicroBatchSpec(max_tokens_per_mb=80))
    batch = ready_batch(actor)
    separate = {**batch, "proximal_logprobs": actor.compute_logprobs(batch)}
    shared_gradients, shared = gradients(actor.engine, batch, actor._loss)
    separate_gradients, apart = gradients(actor.engine, separate, actor._loss)
    assert shared["loss"] == apart["loss"]
    for name, gradient in shared_gradients.items():
        assert torch.equal(gradient, separate_gradients[name]), name
    assert shared["ppo_ratio"] == 1.0
    assert shared["behavior_weight"] != 1.0


def test_ppo_update_when_several_minibatches_then_proximal_is_the_start_of_the_update(make_actor):
    actor = make_actor(ppo_n_minibatches=3, optimizer=OptimizerConfig(lr=5e-3))
    batch = ready_batch(actor)
    proximal = actor.compute_logprobs(batch)
    seen = []
    original = actor.engine.train_batch

    def record(part, loss_fn, **options):
        seen.append(part)
        return original(part, loss_fn, **options)

    actor.engine.train_batch = record
    stats = actor.ppo_update(batch)
    assert len(seen) == 3
    assert actor.engine.step.steps_taken == 3
    order = packing.split_minibatches(batch, 3)
    for part, indices in zip(seen, order, strict=True):
        expected = proximal[packing.token_index(batch, indices)]
        assert torch.equal(part["proximal_logprobs"], expected)
    assert "proximal_logprobs" not in batch
    assert stats["n_tokens"] == len(batch["input_ids"])
    # Later minibatches have moved away from the proximal policy.
    assert stats["approx_kl"] > 1e-6


@pytest.mark.parametrize(
    ("groups", "rewards", "share"),
    [
        ([0, 0, 1, 1, 2], [1.0, 1.0, 0.0, 1.0, 0.5], 0.5),
        ([3, 3, 3, 1, 1], [0.0, 0.0, 0.0, 0.0, 0.0], 1.0),
        ([0, 1, 2, 3, 4], [1.0, 1.0, 0.0, 1.0, 0.5], 0.0),
    ],
    ids=["one of two", "all", "none of several"],
)
def test_ppo_update_when_groups_have_equal_rewards_then_their_share_is_told(
    make_actor, groups, rewards, share
):
    actor = make_actor(reward_norm="batch/batch")
    sequences = [
        {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1], "rewards": [0.0, 0.0, reward]}
        for reward in rewards
    ]
    batch = packing.pack(sequences, groups)
    batch["advantages"] = torch.zeros(15)
    assert actor.describe(batch)["groups_zero_std"] == share


def test_ppo_update_when_reported_then_describes_the_batch(make_actor):
    actor = make_actor()
    batch = ready_batch(actor)
    batch["truncated"] = torch.arange(len(batch["group_index"])) % 2 == 0
    rewards = [float(s["rewards"].sum()) for s in packing.unpack(batch)]
    ages = [
        4 - min(v for v in s["token_versions"].tolist() if v >= 0) for s in packing.unpack(batch)
    ]
    weight = (actor.compute_logprobs(batch) - batch["behavior_logprobs"]).exp()
    stats = actor.ppo_update(batch)
    assert stats["n_sequences"] == len(rewards)
    assert stats["reward"] == pytest.approx(sum(rewards) / len(rewards))
    assert stats["reward_std"] == pytest.approx(statistics.stdev(rewards), rel=1e-6)
    lengths = [int(s["loss_mask"].sum()) for s in packing.unpack(batch)]
    assert stats["response_tokens_max"] == max(lengths)
    assert stats["truncated"] == pytest.approx(float(batch["truncated"].float().mean()))
    assert stats["staleness"] == pytest.approx(sum(ages) / len(ages))
    assert stats["staleness_max"] == max(ages)
    assert stats["response_tokens"] == pytest.approx(float(batch["loss_mask"].sum()) / len(rewards))
    weight = weight[batch["loss_mask"]]
    assert stats["behavior_weight_max"] == pytest.approx(float(weight.max()), rel=1e-5)
    assert stats["behavior_weight"] == pytest.approx(float(weight.mean()), rel=1e-5)
    for name in ("loss", "grad_norm", "entropy", "clip_ratio", "lr", "update_seconds"):
        assert math.isfinite(stats[name])


def test_ppo_update_when_repeated_then_raises_the_probability_of_rewarded_tokens(make_actor):
    actor = make_actor(optimizer=OptimizerConfig(lr=1e-2), adv_norm=None)
    batch = make_batch(groups=3)
    good = batch["rewards"].new_zeros(len(batch["group_index"]))
    good[::3] = 1.0
    last = batch["cu_seqlens"][1:].long() - 1
    batch["rewards"] = torch.zeros_like(batch["rewards"]).index_copy(0, last, good)
    batch["behavior_logprobs"] = actor.compute_logprobs(batch)
    before = batch["behavior_logprobs"]
    for _ in range(8):
        actor.compute_advantages(batch)
        actor.ppo_update(batch)
    change = actor.compute_logprobs(batch) - before
    owner = packing.sequence_index(batch["cu_seqlens"])
    rewarded = (good[owner] > 0) & batch["loss_mask"]
    assert float(change[rewarded].mean()) > 0.2
    assert float(change[batch["loss_mask"] & ~rewarded].mean()) < 0.0


@pytest.mark.parametrize(
    "options",
    [
        {"prox_logp_method": "loglinear"},
        {"prox_logp_method": "behavior"},
        {"prox_logp_method": "unweighted"},
        {"loss_type": "cispo"},
        {"loss_type": "gspo"},
        {"loss_type": "sapo", "behavior_weight_mode": "sequence_truncate"},
        {"kl_loss_ctl": 0.1, "entropy_ctl": 0.01},
        {"c_clip": 3.0, "eps_clip_higher": 0.28, "behavior_weight_cap": None},
    ],
    ids=str,
)
def test_ppo_update_when_settings_vary_then_micro_batching_changes_nothing(make_actor, options):
    batch = make_batch(groups=4)
    collected = []
    for spec in (MicroBatchSpec(), MicroBatchSpec(max_tokens_per_mb=40)):
        actor = make_actor(dtype="float64", mb_spec=spec, **options)
        actor.compute_advantages(batch)
        # Past the proximal policy, so that the ratios are not all 1.
        others = {"proximal_logprobs": batch["behavior_logprobs"] * 0.98} if not options else {}
        if "kl_loss_ctl" in options:
            others["reference_logprobs"] = batch["behavior_logprobs"] * 1.1
        collected.append(gradients(actor.engine, {**batch, **others}, actor._loss))
    (expected, stats), (ours, our_stats) = collected
    assert our_stats["n_micro_batches"] > stats["n_micro_batches"]
    assert_gradients_close(ours, expected, 1e-12)
    for name in stats:
        if name not in ("n_micro_batches", "tokens_per_second", "peak_gib", "seconds") and (
            not name.endswith("_seconds")
        ):
            assert our_stats[name] == pytest.approx(stats[name], rel=1e-9, abs=1e-12), name


@pytest.mark.parametrize("aggregation", ["sequence_mean", "constant"])
def test_take_step_when_aggregated_then_the_loss_is_that_mean_for_any_micro_batches(
    make_actor, aggregation
):
    batch = make_batch(groups=4)
    for spec in (MicroBatchSpec(), MicroBatchSpec(max_tokens_per_mb=40)):
        actor = make_actor(
            dtype="float64",
            mb_spec=spec,
            loss_aggregation=aggregation,
            behavior_weight_cap=None,
            max_response_tokens=50,
        )
        actor.compute_advantages(batch)
        weight = (actor.compute_logprobs(batch) - batch["behavior_logprobs"]).exp()
        each = -weight * batch["advantages"]
        rows = packing.unpack({**batch, "each": each})
        sums = [float(row["each"][row["loss_mask"]].sum()) for row in rows]
        sizes = [int(row["loss_mask"].sum()) if aggregation != "constant" else 50 for row in rows]
        expected = sum(x / n for x, n in zip(sums, sizes, strict=True)) / len(rows)
        assert actor.ppo_update(batch)["loss"] == pytest.approx(expected, rel=1e-9)


def test_ppo_update_when_m2po_then_tokens_are_chosen_over_the_batch_not_the_micro_batch(make_actor):
    batch = make_batch(groups=4)
    found = []
    for spec in (MicroBatchSpec(), MicroBatchSpec(max_tokens_per_mb=40)):
        actor = make_actor(
            dtype="float64",
            mb_spec=spec,
            behavior_weight_mode="second_moment",
            behavior_weight_cap=0.04,
        )
        actor.compute_advantages(batch)
        stats = actor.ppo_update(batch)
        found.append((stats["loss"], stats["behavior_weight_capped_ratio"]))
    assert 0.0 < found[0][1] < 1.0
    assert found[1] == pytest.approx(found[0], rel=1e-9)


@pytest.mark.parametrize("minibatches", [1, 3])
def test_ppo_update_when_m2po_then_equals_the_objective_of_its_note(make_actor, minibatches):
    # From one minibatch to the next the policy moves further than a clip would allow.
    optimizer = OptimizerConfig(lr=3e-2, warmup_steps_proportion=0.0)
    actor = make_actor(
        dtype="float64",
        optimizer=optimizer,
        ppo_n_minibatches=minibatches,
        **PRESETS["m2po"].actor,
    )
    batch = make_batch(groups=6)
    actor.compute_advantages(batch)
    parts = [batch]
    if minibatches > 1:
        batch["proximal_logprobs"] = actor.compute_logprobs(batch)
        split = packing.split_minibatches(batch, minibatches)
        parts = [packing.select(batch, indices) for indices in split]
    moved = 0.0
    for part in parts:
        policy, mask = actor.compute_logprobs(part), part["loss_mask"]
        # The authors' page: M (pi / pi_behavior) A, where M leaves the largest squares out.
        change = (policy - part["behavior_logprobs"])[mask].tolist()
        kept = sorted(range(len(change)), key=lambda i: change[i] ** 2)
        while kept and sum(change[i] ** 2 for i in kept) / len(kept) >= 0.04:
            kept.pop()
        gains = part["advantages"][mask].tolist()
        expected = -sum(math.exp(change[i]) * gains[i] for i in kept) / len(change)
        assert 0 < len(kept) < len(change)
        if "proximal_logprobs" in part:
            moved = max(moved, float((policy - part["proximal_logprobs"])[mask].abs().max()))
        stats = actor.take_step(part if minibatches > 1 else {**part, "proximal_logprobs": policy})
        assert stats["loss"] == pytest.approx(expected, rel=1e-9)
        assert stats["clip_ratio"] == 0.0
        assert stats["behavior_weight_capped_ratio"] == pytest.approx(1 - len(kept) / len(change))
    assert minibatches == 1 or moved > 0.2


def test_ppo_update_when_kl_is_in_the_loss_then_needs_the_reference_and_reports_it(make_actor):
    actor = make_actor(kl_loss_ctl=0.5, kl_estimator="k2")
    batch = ready_batch(actor)
    with pytest.raises(InvalidInput, match="kl_loss_ctl"):
        actor.ppo_update(batch)
    batch["reference_logprobs"] = actor.compute_logprobs(batch) - 2.0 * batch["loss_mask"]
    assert actor.ppo_update(batch)["kl"] == pytest.approx(2.0, rel=1e-4)


def test_actor_when_the_constant_is_missing_then_refused(make_actor):
    with pytest.raises(InvalidInput, match="max_response_tokens"):
        make_actor(loss_aggregation="constant")


def test_compute_advantages_when_called_then_leaves_rewards_and_adds_two_keys(make_actor):
    actor = make_actor()
    batch = make_batch()
    before = {key: value.clone() for key, value in batch.items()}
    actor.compute_advantages(batch)
    assert batch.keys() - before.keys() == {"advantages", "returns"}
    assert all(torch.equal(batch[key], before[key]) for key in before)
    assert batch["advantages"].dtype == torch.float32
    mask = batch["loss_mask"]
    assert float(batch["advantages"][mask].mean()) == pytest.approx(0.0, abs=1e-6)


def test_compute_advantages_when_kl_is_on_then_penalizes_distance(make_actor):
    actor = make_actor(kl_ctl=0.5, reward_norm=None, adv_norm=None, kl_estimator="k2")
    batch = make_batch(groups=1, per_group=1)
    with pytest.raises(InvalidInput, match="reference_logprobs"):
        actor.compute_advantages(batch)
    batch["reference_logprobs"] = actor.compute_logprobs(batch) - 2.0 * batch["loss_mask"]
    actor.compute_advantages(batch)
    mask = batch["loss_mask"]
    # Each loss token costs 0.5 * 2^2 / 2 = 1; the advantage at the first is the outcome less all.
    first = float(batch["advantages"][mask][0])
    assert first == pytest.approx(float(batch["rewards"].sum()) - int(mask.sum()))


def test_ppo_update_when_advantages_are_missing_then_says_so(make_actor):
    with pytest.raises(InvalidInput, match="compute_advantages"):
        make_actor().ppo_update(make_batch())


@pytest.mark.parametrize("minibatches", [1, 2])
def test_kl_penalty_when_the_sampler_was_another_policy_then_is_of_the_current_one(
    make_actor, minibatches
):
    actor = make_actor(kl_ctl=0.5, reward_norm=None, adv_norm=None, ppo_n_minibatches=minibatches)
    batch = make_batch(groups=2)
    current = actor.compute_logprobs(batch)
    mask = batch["loss_mask"]
    assert float((current - batch["behavior_logprobs"])[mask].abs().max()) > 0.1
    batch["reference_logprobs"] = torch.where(mask, current - 1.0, 0.0)
    actor.compute_advantages(batch)
    # k1 is 1 at every loss token: the advantage at the first is the outcome less half of them.
    for sequence in packing.unpack(batch):
        own = sequence["loss_mask"]
        expected = float(sequence["rewards"].sum()) - 0.5 * int(own.sum())
        assert float(sequence["advantages"][own][0]) == pytest.approx(expected, abs=1e-4)
    forwards = []
    original = actor.engine.forward
    actor.engine.forward = lambda *a, **o: forwards.append(1) or original(*a, **o)
    actor.ppo_update(batch)
    assert not forwards, "the logprobs of the same weights were computed twice"


@pytest.mark.parametrize(
    "options",
    [{"prox_logp_method": "behavior"}, {"prox_logp_method": "loglinear"}],
    ids=str,
)
def test_kl_penalty_when_the_loss_does_not_recompute_then_its_center_stays(make_actor, options):
    actor = make_actor(kl_ctl=0.5, **options)
    batch = make_batch(groups=2)
    batch["reference_logprobs"] = batch["behavior_logprobs"] * 0.9
    actor.compute_advantages(batch)
    assert "proximal_logprobs" not in batch


def test_ppo_update_when_a_behavior_logprob_is_a_placeholder_then_steps_with_finite_statistics(
    make_actor,
):
    actor = make_actor(behavior_weight_cap=5.0, behavior_weight_mode="token_mask")
    batch = make_batch(groups=2)
    token = int(torch.nonzero(batch["loss_mask"])[0])
    batch["behavior_logprobs"][token] = -9999.0
    actor.compute_advantages(batch)
    kept = batch["loss_mask"].clone()
    weight = (actor.compute_logprobs(batch) - batch["behavior_logprobs"]).double().exp()
    kept &= weight <= 5.0
    stats = actor.ppo_update(batch)
    assert stats["skipped_steps"] == 0.0
    assert stats["behavior_weight"] == pytest.approx(float(weight[kept].mean()), rel=1e-4)
    assert all(math.isfinite(value) for value in stats.values())


def test_ppo_update_when_sequences_are_of_the_current_version_then_only_they_are_compared(
    make_actor,
):
    actor = make_actor(mb_spec=MicroBatchSpec(max_tokens_per_mb=80))
    batch = ready_batch(actor)
    mask, owner = batch["loss_mask"], packing.sequence_index(batch["cu_seqlens"])
    behavior = actor.compute_logprobs(batch)
    batch["token_versions"] = torch.where(mask, 4, -1)
    batch["behavior_logprobs"] = behavior
    same = actor.ppo_update(dict(batch))
    assert same["mismatch/kl"] < 1e-9
    assert same["mismatch/max"] < 1e-4

    behavior = actor.compute_logprobs(batch)
    # The sampler of sequence 0 was wrong by 0.5 everywhere; one older token hides sequence 1.
    wrong = behavior - 0.5 * (mask & (owner == 0)) - 3.0 * (mask & (owner == 1))
    versions = batch["token_versions"].clone()
    versions[(mask & (owner == 1)).nonzero()[0]] = 3
    stats = actor.ppo_update({**batch, "behavior_logprobs": wrong, "token_versions": versions})
    compared = mask & (owner != 1)
    share = float((mask & (owner == 0)).sum() / compared.sum())
    assert stats["mismatch/max"] == pytest.approx(0.5, abs=1e-4)
    assert stats["mismatch/kl"] == pytest.approx(share * (math.exp(0.5) - 1.5), rel=1e-3)

    stats = actor.ppo_update({**batch, "token_versions": torch.full_like(versions, 3)})
    assert not [name for name in stats if name.startswith("mismatch")]


def test_ppo_update_when_there_are_minibatches_then_the_first_is_compared(make_actor):
    actor = make_actor(ppo_n_minibatches=3, optimizer=OptimizerConfig(lr=5e-2))
    batch = ready_batch(actor)
    batch["behavior_logprobs"] = actor.compute_logprobs(batch)
    batch["token_versions"] = torch.where(batch["loss_mask"], 4, -1)
    stats = actor.ppo_update(batch)
    moved = (actor.compute_logprobs(batch) - batch["behavior_logprobs"]).abs().max()
    assert moved > 1e-2, "the later minibatches have other weights"
    assert stats["mismatch/max"] < 1e-4


def test_reference_when_its_section_is_null_then_refused_in_one_line() -> None:
    with pytest.raises(InvalidInput, match=r"^FSDPPPOActor\(None\): expected a section; for"):
        FSDPPPOActor(None)


@pytest.mark.parametrize(
    ("norm", "share"),
    [
        ("group/group", 2 / 3),
        ("group/none", 2 / 3),
        ("leave1out/none", 2 / 3),
        ("batch/group", 0.0),
        (None, 0.0),
    ],
)
def test_describe_when_groups_have_one_sample_then_equal_only_where_the_norm_makes_them_0(
    make_actor, norm, share
):
    actor = make_actor(reward_norm=norm)
    sequences = [
        {"input_ids": [1, 2], "loss_mask": [0, 1], "rewards": [0.0, reward]}
        for reward in (1.0, 0.5, 0.0, -2.0)
    ]
    batch = packing.pack(sequences, [0, 0, 1, 2])
    described = actor.describe(batch)
    assert described["groups_zero_std"] == pytest.approx(share)
    assert (described["reward_lowest"], described["reward_highest"]) == (-2.0, 1.0)
