"""`actor.attn_impl` is a key, and every other model of the run follows the actor's."""

from types import SimpleNamespace

import pytest

from areal.config.experiment import GRPOConfig, build_config, known_keys
from areal.config.training import CriticConfig, PPOActorConfig, RefConfig
from areal.errors import ConfigError
from areal_torch.engines import fsdp, offline, ppo_actor


class Stop(Exception):
    """Raised with the configuration that an engine is created with."""


@pytest.fixture
def first_engine(monkeypatch):
    def engine(config):
        raise Stop(config)

    monkeypatch.setattr(fsdp, "FSDPEngine", engine)


def test_attn_impl_when_set_then_a_key_of_the_actor_only():
    keys = known_keys(GRPOConfig)
    assert "actor.attn_impl" in keys
    assert "ref.attn_impl" not in keys
    assert PPOActorConfig().attn_impl == "auto"


def test_attn_impl_when_no_such_kernel_then_one_line_names_those_that_exist(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("actor: {attn_impl: sdpa}\n")
    with pytest.raises(ConfigError, match="attn_impl") as refused:
        build_config(GRPOConfig, file, [])
    assert "varlen_repeat_kv" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_critic_when_the_actor_names_a_kernel_then_uses_it():
    assert CriticConfig().engine(PPOActorConfig(attn_impl="packed")).attn_impl == "packed"


@pytest.mark.usefixtures("first_engine")
def test_reference_when_the_actor_names_a_kernel_then_uses_it(monkeypatch):
    actor = PPOActorConfig(attn_impl="varlen")
    session = SimpleNamespace(config=SimpleNamespace(actor=actor))
    monkeypatch.setattr(ppo_actor, "current_session", lambda: session)
    with pytest.raises(Stop) as made:
        ppo_actor.FSDPPPOActor(RefConfig(path="somewhere"))
    assert made.value.args[0].attn_impl == "varlen"


@pytest.mark.usefixtures("first_engine")
def test_frozen_engine_when_the_trained_one_names_a_kernel_then_uses_it():
    with pytest.raises(Stop) as made:
        offline.frozen(PPOActorConfig(attn_impl="varlen"), path="somewhere")
    assert made.value.args[0].attn_impl == "varlen"
