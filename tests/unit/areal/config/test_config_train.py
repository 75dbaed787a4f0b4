import math
from itertools import pairwise

import pytest
from omegaconf import OmegaConf

from areal.config.training import MicroBatchSpec, NormConfig, OptimizerConfig, PPOActorConfig
from areal.errors import ConfigError


def test_config_when_read_by_omegaconf_then_nests_and_overrides():
    schema = OmegaConf.structured(PPOActorConfig)
    overrides = OmegaConf.from_dotlist(
        ["optimizer.lr=3e-4", "reward_norm.mean_level=group", "adv_norm=null", "c_clip=3"]
    )
    # An optional section that is null by default is switched on by setting one of its keys.
    config = OmegaConf.to_object(OmegaConf.merge(schema, overrides))
    assert isinstance(config, PPOActorConfig)
    assert config.optimizer.lr == 3e-4
    assert config.reward_norm.mean_level == "group"
    assert config.adv_norm is None
    assert config.c_clip == 3.0


def test_config_when_default_then_the_loss_is_decoupled_and_recomputed():
    config = PPOActorConfig()
    assert config.use_decoupled_loss
    assert config.recompute_logprob
    assert config.behavior_weight_cap == 5.0
    assert config.kl_ctl == 0.0


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: PPOActorConfig(c_clip=1.0), "c_clip"),
        (lambda: PPOActorConfig(temperature=0.0), "temperature"),
        (lambda: PPOActorConfig(loss_type="trpo"), "loss_type"),
        (lambda: PPOActorConfig(dtype="float16"), "dtype"),
        (lambda: PPOActorConfig(adv_norm=NormConfig("group", "group")), "adv_norm"),
        (lambda: PPOActorConfig(overlong_reward_penalty=True), "overlong_tokens"),
        (lambda: NormConfig(mean_leave1out=True), "mean_leave1out"),
        (lambda: MicroBatchSpec(max_tokens_per_mb=0), "max_tokens_per_mb"),
        (lambda: OptimizerConfig(lr_scheduler_type="step"), "lr_scheduler_type"),
    ],
)
def test_config_when_a_value_is_wrong_then_names_the_field(make, field):
    with pytest.raises(ConfigError, match=field):
        make()


def test_learning_rate_when_scheduled_then_warms_up_and_decays():
    config = OptimizerConfig(
        lr=1.0, lr_scheduler_type="cosine", warmup_steps_proportion=0.1, min_lr_ratio=0.1
    )
    rates = [config.learning_rate(step, 100) for step in range(101)]
    assert rates[:10] == pytest.approx([(i + 1) / 11 for i in range(10)])
    assert rates[10] == 1.0
    assert rates[55] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 2)))
    assert rates[100] == pytest.approx(0.1)
    assert all(a > b for a, b in pairwise(rates[10:]))
    linear = OptimizerConfig(lr=2.0, lr_scheduler_type="linear", warmup_steps_proportion=0.0)
    assert [linear.learning_rate(s, 4) for s in range(6)] == [2.0, 1.5, 1.0, 0.5, 0.0, 0.0]
    assert linear.learning_rate(3, None) == 2.0
