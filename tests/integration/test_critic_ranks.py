"""A critic, sequence weights and M2PO's choice over several ranks: as on one, and resumed."""

import pytest
from tests.integration.test_fsdp_ranks import LIMIT_S, Launches, assert_weights_close

from areal_torch.models.tiny import make_tiny_model

STEPS = list(range(4))
LOSSES = {
    # Around the sampler: around itself every ratio would be 1.
    "gspo": {
        "loss_type": "gspo",
        "loss_aggregation": "sequence_mean",
        "prox_logp_method": "behavior",
    },
    "sequence-weights": {"behavior_weight_mode": "sequence_truncate", "behavior_weight_cap": 2.0},
    "m2po": {"behavior_weight_mode": "second_moment", "behavior_weight_cap": 0.04},
    "constant": {"loss_aggregation": "constant", "max_response_tokens": 16},
}

pytestmark = [pytest.mark.timeout(2 * LIMIT_S + 20), pytest.mark.long]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    launches = Launches(folder, make_tiny_model(folder / "model", seed=3, hidden_size=64))
    job, checkpoint = launches.job, launches.checkpoint
    ppo = {"critic": True, "gae_lambda": 0.9, "reward_norm": None}
    critic = {"seeds": STEPS, "critic": {"lr": 3e-3}, "options": ppo}
    # Each rank splits its own share into minibatches: other ranks, other minibatches.
    split = critic | {"dtype": "float32", "options": ppo | {"ppo_n_minibatches": 2}}

    def common(ranks):
        saved = checkpoint(f"bits-{ranks}")
        return [
            job(f"critic-{ranks}", **critic),
            job(f"whole-{ranks}", **split),
            job(f"saving-{ranks}", **split, save_at=2, save_to=saved, background=True),
            job(f"resumed-{ranks}", **split, resume=saved),
            *[job(f"{name}-{ranks}", seeds=[0, 1], options=each) for name, each in LOSSES.items()],
        ]

    half = checkpoint("half")
    launches.launch(
        (1, [*common(1), job("half", **critic, save_at=2, save_to=half)]),
        (2, [*common(2), job("one-then-two", **critic, resume=half)]),
    )
    return launches


@pytest.mark.parametrize("name", ["critic", *LOSSES])
def test_weights_when_trained_on_two_ranks_then_equal_those_of_one(runs, name):
    (one, rows), (two, rows2) = runs.results[f"{name}-1"], runs.results[f"{name}-2"]
    assert_weights_close(two, one, 1e-10)
    assert len(rows) == len(rows2) > 1
    compared = {"loss", "grad_norm", "reward"}
    compared |= {key for key in rows[0] if key.startswith(("behavior_weight", "clip", "ppo_ratio"))}
    told = ("loss", "grad_norm", "value", "return", "explained_variance", "clip_ratio")
    if name == "critic":
        compared |= {f"critic/{each}" for each in told}
    for a, b in zip(rows, rows2, strict=True):
        for key in compared:
            assert b[key] == pytest.approx(a[key], rel=1e-8, abs=1e-12), key
    if name == "m2po":  # something was left out, and not all
        assert all(0.0 < row["behavior_weight_capped_ratio"] < 1.0 for row in rows)
    if name == "gspo":
        assert all(row["ppo_ratio"] != 1.0 for row in rows)
    if name == "critic":
        assert rows[-1]["critic/explained_variance"] != 0.0


@pytest.mark.parametrize("ranks", [1, 2])
def test_checkpoint_when_a_critic_is_beside_then_both_continue_to_the_bit(runs, ranks):
    whole, rows = runs.results[f"whole-{ranks}"]
    assert len(rows) == len(STEPS)
    assert any(name.startswith("critic.") for name in whole)
    resumed, after = runs.results[f"resumed-{ranks}"]
    assert len(after) == len(STEPS) - 2
    assert_weights_close(runs.results[f"saving-{ranks}"][0], whole, 0.0)
    assert_weights_close(resumed, whole, 0.0)


def test_checkpoint_when_resumed_on_another_number_of_ranks_then_the_critic_equals_it(runs):
    assert_weights_close(runs.results["one-then-two"][0], runs.results["critic-1"][0], 1e-10)
