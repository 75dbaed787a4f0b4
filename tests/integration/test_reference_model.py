"""A run with a frozen reference model: what is trained, what a checkpoint holds, what resumes.

A real ledger, real engines; weight-sync is the one fake: it takes every version.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.buffer_client import BufferClient
from tests.buffer_server import start_buffer
from tests.chaos.trainer_rig import synthetic_group
from tests.integration.test_trainer_session import ServedVersion
from tests.ledger_support import make_task
from tests.redis_server import start_redis

from areal.config.experiment import GRPOConfig, RefConfig
from areal.config.training import LoraConfig
from areal.errors import InvalidInput
from areal.types import Purpose, WeightUpdateMeta
from areal.weights.manifest import PolicyVersion
from areal.workflows.rlvr import RLVRWorkflow
from areal_torch.engines.model.heads import LogprobHead
from areal_torch.engines.ppo_actor import FSDPPPOActor
from areal_torch.engines.rollout import RemoteSGLangEngine
from areal_torch.models.tiny import make_tiny_model
from areal_torch.training.session import TrainerSession

BATCH, STEPS = 2, 4


class Versions(ServedVersion):
    """Weight-sync whose servers take every version at once."""

    def __init__(self) -> None:
        self.stuck = False
        self.published: list[set[str]] = []
        """Types of the tensors of each version."""
        self.numbers: list[int] = []

    async def publish_version(self, version: PolicyVersion) -> None:
        if self.stuck and version.version > 0:
            await asyncio.Event().wait()
        self.numbers.append(version.version)
        self.published.append({tensor.dtype for tensor in version.tensors})


class Session(TrainerSession):
    async def _connect(self):
        return BufferClient(self.config.endpoints.buffer), Versions()


class Rows:
    """A loader over the rows whose groups the ledger has."""

    def __init__(self) -> None:
        self.start = 0

    def __iter__(self) -> Iterator[tuple[int, int, dict[str, str]]]:
        return iter([(0, index, {"prompt": "1+1="}) for index in range(self.start, BATCH * STEPS)])

    def seek(self, epoch: int, cursor: int) -> None:
        self.start = cursor


class Crash(Exception):
    """The process died here: nothing was saved on the way out."""


class Trial:
    """One trial with its own ledger; `life` is one trainer."""

    def __init__(self, config: GRPOConfig) -> None:
        self.config = config
        self.stuck = False
        """Whether weight-sync takes no version but the first."""

    def life(self, until: int, *, offload: bool = False) -> dict[str, dict[str, torch.Tensor]]:
        """Trains to step `until` as a recipe does; returns the weights of both models."""
        session = Session(self.config)
        session.weight_sync.stuck = self.stuck
        session.open()
        engines = []
        try:
            with session.active():
                actor = FSDPPPOActor(self.config.actor)
                ref = FSDPPPOActor(RefConfig(path=self.config.ref.path, offload=offload))
                rollout = RemoteSGLangEngine(self.config.rollout)
                engines = [actor.engine, ref.engine]
                self.kl = 0.0
                while actor.get_version() < until:
                    batch = rollout.prepare_batch(Rows(), RLVRWorkflow("math"))
                    batch["reference_logprobs"] = ref.compute_logprobs(batch)
                    self.kl += float(
                        (batch["reference_logprobs"] - batch["behavior_logprobs"]).sum()
                    )
                    self.batch = batch
                    actor.compute_advantages(batch)
                    actor.ppo_update(batch)
                    actor.upload_weights(WeightUpdateMeta())
                found = {
                    name: dict(model.engine.iter_full_tensors())
                    for name, model in (("actor", actor), ("ref", ref))
                }
                self.published = session.weight_sync.published
                self.versions = session.weight_sync.numbers
                if until < STEPS:
                    session._checkpoints.settle(wait=True)
                    if not self.stuck:
                        session.publishing.settle()
                    raise Crash
        except Crash:
            pass
        finally:
            for engine in reversed(engines):
                engine.destroy()
            session.close()
        return found


@contextmanager
def new_trial(root: Path, actor: Path, reference: Path, redis: str) -> Iterator[Trial]:
    config = GRPOConfig(trial_name=root.name, run_root=str(root), total_train_steps=STEPS)
    config.model.path = str(actor)
    config.ref = RefConfig(path=str(reference))
    config.actor.kl_ctl = 0.5
    config.actor.optimizer.lr = 1e-2
    config.train_dataset.batch_size = BATCH
    config.rollout.max_head_offpolicyness = STEPS
    config.checkpoint.freq_steps = 1

    async def fill() -> None:
        client = BufferClient(config.endpoints.buffer)
        ids = [f"e0-{number}" for number in range(BATCH * STEPS)]
        await client.submit_tasks([make_task(i, Purpose.TRAIN) for i in ids])
        leases, _ = await client.lease_tasks("w", len(ids), 5.0)
        for lease in leases:
            task_id = lease.task.task_id
            group = synthetic_group(task_id, int(task_id.removeprefix("e0-")))
            await client.complete_task(task_id, lease.token, group, "w")
        await client.close()

    limits = (
        f"rollout.max_head_offpolicyness={STEPS}",
        f"train_dataset.batch_size={BATCH}",
        f"trial_name={root.name}",
    )
    with start_buffer(root / "b", redis, *limits) as address:
        config.endpoints.buffer = address
        asyncio.run(fill())
        yield Trial(config)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The policy to start from, and another one as its reference."""
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("models")
    return (
        Path(make_tiny_model(root / "policy", seed=1, hidden_size=32)),
        Path(make_tiny_model(root / "reference", seed=2, hidden_size=32)),
    )


@pytest.fixture
def trial(
    tmp_path: Path, models: tuple[Path, Path]
) -> Iterator[Callable[[str], contextmanager[Trial]]]:
    with start_redis(tmp_path) as redis:
        yield lambda name: new_trial(tmp_path / name, *models, redis)


def assert_equal(ours: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(ours[name], tensor), name


def test_resume_when_there_is_a_reference_model_then_the_actor_goes_on_and_the_reference_is_new(
    trial, models: tuple[Path, Path]
) -> None:
    with trial("whole") as whole:
        expected = whole.life(STEPS)
        assert whole.kl != 0.0
    start, reference = (load_file(path / "model.safetensors") for path in models)
    assert not torch.equal(expected["actor"]["model.norm.weight"], start["model.norm.weight"])
    with trial("killed") as killed:
        before = killed.life(2)
        assert not torch.equal(
            before["actor"]["model.norm.weight"], expected["actor"]["model.norm.weight"]
        )
        # The second life starts from a checkpoint: of the actor.
        after = killed.life(STEPS)
    assert_equal(after["actor"], expected["actor"])
    for found in (expected, before, after):
        assert_equal(found["ref"], reference)


def test_resume_when_killed_before_a_version_was_announced_then_publishes_it_first(trial) -> None:
    """Its checkpoint is whole and committed: the step that it is of is not taken again."""
    with trial("killed") as killed:
        killed.stuck = True
        before = killed.life(1)
        assert killed.versions == [0]
        killed.stuck = False
        after = killed.life(2)
        assert killed.versions == [1, 2]
    with trial("whole") as whole:
        assert_equal(whole.life(2)["actor"], after["actor"])
    assert not torch.equal(
        before["actor"]["model.norm.weight"], after["actor"]["model.norm.weight"]
    )


def test_reference_when_offloaded_then_the_same_training_to_the_bit(trial) -> None:
    with trial("here") as here, trial("offloaded") as offloaded:
        assert_equal(offloaded.life(STEPS, offload=True)["actor"], here.life(STEPS)["actor"])


def test_adapters_when_killed_then_they_resume_and_the_reference_is_the_model_without_them(
    trial, models: tuple[Path, Path]
) -> None:
    def adapted(trial: Trial, reference: str) -> Trial:
        trial.config.actor.lora = LoraConfig(rank=4, alpha=64)
        trial.config.ref.path = reference
        return trial

    with trial("whole") as whole, trial("killed") as killed, trial("own") as own:
        expected = adapted(whole, "").life(STEPS)["actor"]
        adapted(killed, "").life(2)
        assert_equal(killed.life(STEPS)["actor"], expected)
        # A reference engine of its own, of the same model.
        assert_equal(adapted(own, str(models[0])).life(STEPS)["actor"], expected)
        assert torch.equal(whole.batch["reference_logprobs"], own.batch["reference_logprobs"])
    before = dict(load_file(models[0] / "model.safetensors"))
    changed = {name for name, tensor in before.items() if not torch.equal(expected[name], tensor)}
    assert len(changed) == 7 * sum(name.endswith("q_proj.weight") for name in before)
    assert all(name.endswith("_proj.weight") for name in changed)


def test_reference_when_it_is_the_actor_without_adapters_then_the_actor_is_made_first(
    trial,
) -> None:
    with trial("order") as order:
        order.config.actor.lora = LoraConfig(rank=4)
        session = Session(order.config)
        session.open()
        try:
            with (
                pytest.raises(InvalidInput, match=r"expected FSDPPPOActor\(config\.actor\) first"),
                session.active(),
            ):
                FSDPPPOActor(RefConfig())
        finally:
            session.close()


def test_models_when_the_sampler_has_a_temperature_then_compared_at_it_and_no_other(trial) -> None:
    with trial("warm") as warm:
        warm.config.gconfig.temperature = 0.6
        session = Session(warm.config)
        session.open()
        try:
            with session.active():
                rollout = RemoteSGLangEngine(warm.config.rollout)
                actor = FSDPPPOActor(warm.config.actor)
                ref = FSDPPPOActor(warm.config.ref)
                with pytest.raises(InvalidInput, match=r"temperature 1\.0: expected the .* 0\.6"):
                    rollout.prepare_batch(Rows(), RLVRWorkflow("math"))
                batch = rollout.prepare_batch(Rows(), RLVRWorkflow("math", warm.config.gconfig))
                for model in (actor, ref):
                    expected = model.engine.forward(batch, LogprobHead(0.6))
                    assert torch.equal(model.compute_logprobs(batch), expected)
                    assert not torch.allclose(expected, model.engine.forward(batch))
                for model in (ref, actor):
                    model.engine.destroy()
                raise Crash
        except Crash:
            pass
        finally:
            session.close()


def test_actor_when_frozen_or_a_second_one_then_refused_in_one_line(trial) -> None:
    with trial("misused") as misused:
        session = Session(misused.config)
        session.open()
        try:
            with session.active():
                actor = FSDPPPOActor(misused.config.actor)
                ref = FSDPPPOActor(misused.config.ref)
                assert ref.engine.step.optimizer is None
                with pytest.raises(
                    InvalidInput, match="this model is frozen; call it on the actor"
                ):
                    ref.upload_weights(WeightUpdateMeta())
                with pytest.raises(InvalidInput, match="a second trainable actor: expected one"):
                    FSDPPPOActor(misused.config.actor)
                assert session.step == 0
                for engine in (ref.engine, actor.engine):
                    engine.destroy()
                raise Crash
        except Crash:
            pass
        finally:
            session.close()


@pytest.mark.parametrize(("stored", "published"), [("bfloat16", "BF16"), ("float32", "F32")])
def test_versions_when_the_dtype_is_left_open_then_published_in_the_checkpoints(
    trial, models: tuple[Path, Path], tmp_path: Path, stored: str, published: str
) -> None:
    policy = shutil.copytree(models[0], tmp_path / "policy")
    config = json.loads((policy / "config.json").read_text())
    (policy / "config.json").write_text(json.dumps({**config, "dtype": stored}))
    with trial("stored") as stored_so:
        stored_so.config.model.path = str(policy)
        stored_so.life(1)
        assert set().union(*stored_so.published) == {published}
