"""One temperature: the sampler's is the trainer's, and the reference model's."""

import math

import pytest
import torch
from tests.unit.areal_torch.engines.train_fixtures import make_batch

from areal.config.experiment import GRPOConfig
from areal.config.training import PPOActorConfig
from areal.errors import InvalidInput
from areal.types import GenerationHyperparameters
from areal.workflows.base import RolloutWorkflow
from areal.workflows.rlvr import RLVRWorkflow
from areal_torch.engines.fsdp import FSDPEngine
from areal_torch.engines.model.heads import LogprobHead
from areal_torch.engines.ppo import PPOActor
from areal_torch.engines.rollout import check_sampling


class Judged(RolloutWorkflow):
    """A policy that samples and a judge that does not."""

    def __init__(self, judge, policy):
        self.judge, self.policy = judge, policy

    async def arun_episode(self, engine, data):
        return None


class Fixed(RolloutWorkflow):
    """Nothing to look at."""

    async def arun_episode(self, engine, data):
        return None


def at(temperature, **more):
    return GenerationHyperparameters(temperature=temperature, **more)


def test_check_sampling_when_the_workflow_samples_otherwise_then_names_both_temperatures():
    with pytest.raises(InvalidInput) as caught:
        check_sampling(RLVRWorkflow("math", at(0.6)), 1.0)
    message = str(caught.value)
    assert message.startswith("RLVRWorkflow.gconfig samples at temperature 0.6: expected the")
    assert "trainer's, 1.0" in message
    assert "\n" not in message
    with pytest.raises(InvalidInput, match=r"temperature 0\.0"):
        check_sampling(RLVRWorkflow("math", at(1.0, greedy=True)), 1.0)
    with pytest.raises(InvalidInput, match=r"temperature 1\.0: expected the trainer's, 0\.6"):
        check_sampling(RLVRWorkflow("math"), 0.6)  # its default
    with pytest.raises(InvalidInput, match=r"Judged\.judge samples"):
        check_sampling(Judged(at(0.0), at(0.7)), 1.0)


def test_check_sampling_when_it_fits_or_cannot_be_seen_then_accepted():
    for workflow in (RLVRWorkflow("math", at(0.6)), Judged(at(0.0), at(0.6)), Fixed()):
        check_sampling(workflow, 0.6)


def test_logprobs_when_the_sampler_has_a_temperature_then_the_actor_compares_at_it(model_dir):
    config = GRPOConfig()
    config.gconfig.temperature = 0.6
    engine = FSDPEngine(PPOActorConfig(path=str(model_dir)))
    engine.initialize()
    try:
        batch = make_batch(0)
        actor = PPOActor(config.actor, engine, config.gconfig.temperature)
        expected = engine.forward(batch, LogprobHead(0.6))
        assert torch.equal(actor.compute_logprobs(batch), expected)
        assert not torch.allclose(expected, engine.forward(batch, LogprobHead(1.0)))
        # On its own policy, sampled at that temperature, no token has another weight than 1.
        batch["behavior_logprobs"] = expected
        actor.compute_advantages(batch)
        stats = actor.ppo_update(batch)
        assert math.isclose(stats["behavior_weight"], 1.0, rel_tol=1e-6)
    finally:
        engine.destroy()
