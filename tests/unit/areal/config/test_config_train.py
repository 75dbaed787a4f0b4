import math
from itertools import pairwise

import pytest
from omegaconf import OmegaConf

from areal.config.checks import check
from areal.config.training import (
    MicroBatchSpec,
    OptimizerConfig,
    PPOActorConfig,
    TrainEngineConfig,
)
from areal.errors import ConfigError
from areal_torch.engines.fsdp import FSDPEngine


def test_config_when_read_by_omegaconf_then_nests_and_overrides():
    schema = OmegaConf.structured(PPOActorConfig)
    overrides = OmegaConf.from_dotlist(
        ["optimizer.lr=3e-4", "reward_norm=group/none", "adv_norm=null", "c_clip=3"]
    )
    config = OmegaConf.to_object(OmegaConf.merge(schema, overrides))
    assert isinstance(config, PPOActorConfig)
    assert config.optimizer.lr == 3e-4
    assert config.reward_norm == "group/none"
    assert config.adv_norm is None
    assert config.c_clip == 3.0


def test_config_when_default_then_the_loss_is_decoupled_and_recomputed():
    config = PPOActorConfig()
    assert config.decoupled
    assert config.prox_logp_method == "recompute"
    assert (config.behavior_weight_mode, config.behavior_weight_cap) == ("token_truncate", 5.0)
    assert config.kl_ctl == 0.0


@pytest.mark.parametrize(
    ("config", "line"),
    [
        (PPOActorConfig(c_clip=1.0), "c_clip 1.0: expected more than 1"),
        (PPOActorConfig(logits_chunk_elements=0), "logits_chunk_elements 0: expected more than 0"),
        (
            TrainEngineConfig(dtype="half"),
            "dtype 'half': expected 'auto', 'float32', 'bfloat16' or",
        ),
        (
            TrainEngineConfig(mb_spec=MicroBatchSpec(max_tokens_per_mb=0)),
            "mb_spec.max_tokens_per_mb 0: expected more than 0",
        ),
        (OptimizerConfig(beta1=1.0), "beta1 1.0: expected less than 1"),
        (OptimizerConfig(lr="high"), "lr 'high': expected a valid number"),
    ],
)
def test_check_when_a_value_is_wrong_then_one_line_names_field_value_and_expectation(config, line):
    with pytest.raises(ConfigError) as caught:
        check(config)
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)


def test_engine_when_code_gives_a_wrong_value_then_refused_before_anything_is_loaded():
    with pytest.raises(ConfigError, match="attn_impl 'fast': expected"):
        FSDPEngine(TrainEngineConfig(attn_impl="fast"))


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
