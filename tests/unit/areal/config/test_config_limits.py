"""Where the values of an experiment file end: the last good one is taken, the next one refused."""

from __future__ import annotations

import pytest

from areal.config.experiment import GRPOConfig, build_config, load_service_config, save_config
from areal.config.losses import LOSSES
from areal.config.transports import (
    OBJECT_STORES,
    STORING,
    TRANSPORTS,
    is_fetched,
    transport_named,
    transport_order,
)
from areal.errors import ConfigError, InvalidInput

# Key, the last value that is taken, the first that is not, what its error says.
LIMITS = [
    ("train_dataset.batch_size", "1", "0", "1 or more"),
    ("seed", "4294967295", "4294967296", "less than 4294967296"),
    ("total_train_steps", "1", "0", "1 or more"),
    ("stack.gateway_port", "65535", "65536", "65535 or less"),
    ("gconfig.top_p", "1", "0", "more than 0"),
    ("gconfig.n_samples", "1", "0", "1 or more"),
    ("gconfig.temperature", "0.1", "-0.1", "a temperature > 0"),
    ("rollout.max_head_offpolicyness", "0", "-1", "0 or more"),
    ("rollout.max_concurrent_rollouts", "1", "0", "1 or more"),
    ("rollout.max_failure_ratio", "0", "-0.1", "0 or more"),
    ("rollout.max_failure_ratio", "1", "1.1", "1 or less"),
    ("reward.workers", "1", "0", "1 or more"),
    ("reward.memory_mb", "64", "63", "64 or more"),
    ("checkpoint.freq_steps", "0", "-1", "0 or more"),
    ("checkpoint.keep", "1", "0", "1 or more"),
    ("stack.rollout_workers", "1", "0", "1 or more"),
    ("stack.gateway_port", "0", "-1", "0 or more"),
    ("stack.gpus_per_node", "0", "-1", "0 or more"),
    ("stack.ranks_per_node", "0", "-1", "0 or more"),
    ("weight_sync.max_unavailable", "0", "-1", "0 or more"),
    ("weight_sync.transport", "stream", "mail", f"one of {', '.join(TRANSPORTS)}"),
    ("weight_sync.encoding", "delta", "gzip", "one of full, delta"),
    ("weight_sync.interrupt", "abort", "kill", "one of in_place, retract, abort"),
    ("model.dtype", "float32", "float16", "one of "),
    ("allocation_mode", "sglang:d1+fsdp:d1", "sglang:d0+fsdp:d1", "needs d1 or more"),
    (
        "allocation_mode",
        "sglang:d1p1+fsdp:d1",
        "sglang:d1p2+fsdp:d1",
        "expected p1, because there is no pipeline parallelism",
    ),
    (
        "allocation_mode",
        "sglang:d1t4+fsdp:d1t2",
        "sglang:d1t4+fsdp:d1p2",
        "expected p1, because there is no pipeline parallelism",
    ),
    ("endpoints.inference", "[http://a:1]", "[a]", "http://HOST:PORT"),
    ("trial_name", "a" * 63, "a" * 64, "lower-case letters, digits and dashes"),
    ("trial_name", "a-b", "a-", "lower-case letters, digits and dashes"),
    ("trial_name", "a0", "a_0", "lower-case letters, digits and dashes"),
    ("actor.optimizer.lr", "0", "-1e-9", "0 or more"),
    ("actor.optimizer.beta2", "0", "-0.1", "0 or more"),
    ("actor.optimizer.beta2", "0", "1", "less than 1"),
    ("actor.optimizer.warmup_steps_proportion", "1", "1.01", "1 or less"),
    ("actor.optimizer.warmup_steps_proportion", "0", "-0.01", "0 or more"),
    ("actor.optimizer.gradient_clipping", "0", "-1", "0 or more"),
    ("actor.ppo_n_minibatches", "1", "0", "more than 0"),
    ("actor.eps_clip", "0.01", "0", "more than 0"),
    ("actor.eps_clip", "1", "1.01", "1 or less"),
    ("actor.behavior_weight_cap", "0.1", "0", "more than 0"),
    ("actor.reward_clip", "0.1", "0", "more than 0"),
    ("actor.c_clip", "1.1", "1", "more than 1"),
    ("actor.dtype", "float64", "float16", "one of auto, float32, bfloat16, float64"),
    ("actor.loss_type", "cispo", "trpo", f"one of {', '.join(LOSSES)}"),
    ("actor.adv_norm", "batch/none", "group/group", "one of batch/batch, batch/none, none/batch"),
    ("actor.reward_norm", "leave1out/none", "none/none", "one of group/group"),
    ("actor.mb_spec.max_tokens_per_mb", "1", "0", "more than 0"),
    ("actor.optimizer.lr_scheduler_type", "cosine", "step", "one of constant, linear, cosine"),
    ("actor.kl_estimator", "k3", "k4", "one of k1, k2, k3"),
]


@pytest.mark.parametrize(("key", "good", "bad", "expected"), LIMITS)
def test_limit_when_met_then_taken_and_when_passed_then_one_line_names_it(
    key: str, good: str, bad: str, expected: str
) -> None:
    build_config(GRPOConfig, None, [f"{key}={good}"])
    with pytest.raises(ConfigError) as caught:
        build_config(GRPOConfig, None, [f"{key}={bad}"])
    line = str(caught.value)
    assert key.rsplit(".", maxsplit=1)[-1] in line or bad.strip("[]") in line
    assert expected in line
    assert "\n" not in line


# Each is fine without the last of its settings.
TOGETHER = [
    (["weight_sync.transport=distributed"], "weight_sync.max_unavailable=1", "expected 0 with"),
    (["gconfig.max_new_tokens=8"], "actor.overlong_tokens=9", "0 to 8 (gconfig.max_new_tokens)"),
    (["algorithm=m2po"], "actor.prox_logp_method=behavior", "expected actor.prox_logp_method"),
    (["algorithm=m2po"], "actor.behavior_weight_cap=5.0", "at most 1"),
]


@pytest.mark.parametrize(("first", "last", "expected"), TOGETHER)
def test_settings_when_they_contradict_each_other_then_refused(
    first: list[str], last: str, expected: str
) -> None:
    build_config(GRPOConfig, None, first)
    with pytest.raises(ConfigError) as caught:
        build_config(GRPOConfig, None, [*first, last])
    assert expected in str(caught.value)


def test_service_config_when_overridden_then_the_override_wins_and_is_checked(tmp_path) -> None:
    file = tmp_path / "config.yaml"
    save_config(build_config(GRPOConfig, None, ["reward.workers=2"]), file)
    assert load_service_config(file).reward.workers == 2
    assert load_service_config(file, ["reward.workers=3"]).reward.workers == 3
    with pytest.raises(ConfigError, match=r"reward\.workers 0: expected 1 or more"):
        load_service_config(file, ["reward.workers=0"])


def test_transports_when_ordered_then_the_configured_one_that_stores_is_first() -> None:
    for name, transport in TRANSPORTS.items():
        first = (name,) if transport.stores else ()
        order = transport_order(name)
        assert order[: len(first)] == first
        assert sorted(order) == sorted(STORING)
        assert set(STORING) == {name for name, each in TRANSPORTS.items() if each.stores}


def test_transport_when_a_recipe_names_none_then_an_error_and_not_another_transport() -> None:
    with pytest.raises(InvalidInput, match=r"WeightUpdateMeta\.type 'disc': .*did you mean 'disk'"):
        transport_named("disc")


@pytest.mark.parametrize(
    ("location", "fetched"),
    [
        ("http://h:1/versions/v00000001-inc0", True),
        *((f"{scheme}bucket/v00000001-inc0", True) for scheme in OBJECT_STORES),
        ("/weights/v00000001-inc0", False),
        ("weights/s3", False),
    ],
)
def test_location_when_it_is_no_folder_then_it_is_fetched(location: str, fetched: bool) -> None:
    assert is_fetched(location) is fetched


def test_value_when_it_holds_a_password_then_the_error_does_not() -> None:
    with pytest.raises(ConfigError) as caught:
        build_config(GRPOConfig, None, ["seed=redis://:0123456789abcdef@host:1"])
    assert "0123456789abcdef" not in str(caught.value)
