"""A critic's step whose gradient is not finite: its batch is kept as the actor's is."""

import pytest
import torch
from tests.unit.areal_torch.engines.train_fixtures import make_batch

from areal.config.experiment import GRPOConfig
from areal.config.training import CriticConfig, OptimizerConfig, PPOActorConfig
from areal.errors import TrainingDiverged
from areal_torch.engines import failed_step
from areal_torch.engines.ppo_actor import FSDPPPOActor
from areal_torch.engines.ppo_critic import FSDPPPOCritic
from areal_torch.training import session as sessions
from areal_torch.training.session import TrainerSession


@pytest.fixture
def session(tmp_path, model_dir):
    """Of a run with a critic, registered nowhere."""
    actor = PPOActorConfig(
        path=str(model_dir), optimizer=OptimizerConfig(max_skipped_steps=1), critic=True
    )
    config = GRPOConfig(run_root=str(tmp_path), actor=actor, critic=CriticConfig())
    made = TrainerSession(config)
    token = sessions._CURRENT.set(made)
    yield made
    sessions._CURRENT.reset(token)
    made.close()


def test_ppo_update_when_the_critic_diverges_then_its_batch_is_kept_and_replayed(
    session, model_dir
):
    actor = FSDPPPOActor(session.config.actor)
    critic = FSDPPPOCritic(session.config.critic)
    batch = make_batch()
    batch["values"] = critic.compute_values(batch)
    actor.compute_advantages(batch)
    batch["returns"][torch.nonzero(batch["loss_mask"])[-1]] = torch.nan
    session.batch_tasks = [f"task-{group}" for group in range(20)]
    before = [p.detach().clone() for p in critic.engine.model.parameters()]

    with pytest.raises(TrainingDiverged) as caught:
        critic.ppo_update(batch)

    folder = session.config.run_dir / "failed_step_1"
    blamed = int(batch["group_index"][-1])
    assert str(caught.value).startswith("step 1: critic: 1 optimizer steps in a row")
    assert f"its batch is in {folder} (not finite: tasks task-{blamed})" in str(caught.value)
    (kept,), info = failed_step.load_failed_batch(folder)
    assert kept.keys() == batch.keys()
    for key, tensor in batch.items():
        torch.testing.assert_close(kept[key], tensor, rtol=0, atol=0, equal_nan=True)
    assert info["critic"]["scalar"]
    assert "actor" not in info
    for ours, then in zip(critic.engine.model.parameters(), before, strict=True):
        assert torch.equal(ours, then)
    critic.engine.destroy()
    actor.engine.destroy()
    assert failed_step.replay(folder, model_dir) == [caught.value.cause]
