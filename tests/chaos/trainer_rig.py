"""A real stack without trainer, a ledger filled beforehand, and trainers to start and kill."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from omegaconf import OmegaConf
from tests.buffer_client import BufferClient
from tests.integration.stack_tools import RunningStack, areal_background, environment, eventually
from tests.service_process import free_port

from areal.types import Purpose, Task, Trajectory, TrajectoryGroup, WorkflowSpec

RECIPE = Path(__file__).parent / "recipes" / "replay.py"
BATCH = 4
NOBODY = "127.0.0.1:9"


def synthetic_group(task_id: str, number: int) -> TrajectoryGroup:
    """Three answers to one prompt, different for each number, sampled at version 0."""
    rng = np.random.default_rng(number)
    prompt = int(rng.integers(3, 8))
    prompt_ids = rng.integers(0, 256, prompt)
    trajectories = []
    for sample in range(3):
        length = prompt + int(rng.integers(2, 9))
        generated = np.arange(length) >= prompt
        answer_ids = rng.integers(0, 256, length - prompt)
        rewards = np.zeros(length, np.float32)
        rewards[-1] = float(sample == number % 3)
        trajectories.append(
            Trajectory(
                trajectory_id=f"{task_id}.{sample}",
                input_ids=np.concatenate([prompt_ids, answer_ids]).astype(np.int32),
                loss_mask=generated,
                behavior_logprobs=np.where(
                    generated, -5.5 + 0.3 * rng.normal(size=length), 0.0
                ).astype(np.float32),
                token_versions=np.where(generated, 0, -1).astype(np.int32),
                rewards=rewards,
            )
        )
    return TrajectoryGroup(task_id=task_id, trajectories=trajectories)


def digest_of(group: TrajectoryGroup) -> str:
    """As the recipe's `group_digests` computes it."""
    digest = hashlib.sha256()
    for t in group.trajectories:
        digest.update(t.input_ids.astype(np.int64).tobytes())
        digest.update(np.asarray(t.loss_mask, bool).tobytes())
        digest.update(np.asarray(t.behavior_logprobs, np.float32).tobytes())
        digest.update(t.token_versions.astype(np.int64).tobytes())
        digest.update(np.asarray(t.rewards, np.float32).tobytes())
    return digest.hexdigest()[:16]


class TrainerProcess:
    """One life of the trainer: a process per rank, under torchrun if there are several."""

    def __init__(self, config: Path, listen: str, ranks: int, log: Path) -> None:
        launch: tuple[str, ...] = ()
        if ranks > 1:
            launch = (
                *("torch.distributed.run", "--nnodes", "1", "--nproc-per-node", str(ranks)),
                *("--master-addr", "127.0.0.1", "--master-port", str(free_port()), "-m"),
            )
        command = [sys.executable, "-m", *launch, "areal_trainer"]
        with log.open("ab") as output:
            self.popen = subprocess.Popen(
                [*command, "--config", str(config), "--listen", listen],
                stdout=output,
                stderr=output,
                env=environment(),
                start_new_session=True,
            )

    def processes(self) -> list[psutil.Process]:
        """It and all its descendants."""
        try:
            root = psutil.Process(self.popen.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def kill(self) -> None:
        """kill -9 of every process of it at once."""
        family = self.processes()
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.popen.wait(20)
        psutil.wait_procs(family, timeout=20)


class TrainerRig:
    """`areal up` of one trial; the trainers are the test's."""

    def __init__(self, cwd: Path, trial: str, overrides: tuple[str, ...]) -> None:
        self.stack = RunningStack(cwd / "runs" / "replay" / trial)
        self.trainer_address = f"127.0.0.1:{free_port()}"
        self._cwd = cwd
        self.overrides = (
            "experiment_name=replay",
            f"trial_name={trial}",
            f"run_root={cwd / 'runs'}",
            f"train_dataset.batch_size={BATCH}",
            "gconfig.n_samples=3",
            "gconfig.max_new_tokens=8",
            "model.context_length=128",
            "allocation_mode=sglang:d1+fsdp:d1",
            "actor.optimizer.lr=1e-3",
            f"endpoints.trainer={self.trainer_address}",
            *overrides,
        )
        self.rejected: list[str] = []
        """Tasks that `prefill` gave a group which was rejected."""
        self._trainers: list[TrainerProcess] = []
        self._launcher: subprocess.Popen[bytes] | None = None

    @property
    def run_dir(self) -> Path:
        return self.stack.run_dir

    @property
    def trainer_log(self) -> str:
        file = self._cwd / f"{self.run_dir.name}-trainer.log"
        return file.read_text() if file.exists() else ""

    def start(self) -> None:
        self._launcher = areal_background(
            *("up", "--recipe", str(RECIPE), *self.overrides),
            cwd=self._cwd,
            log=self._cwd / f"{self.run_dir.name}-up.log",
        )
        eventually(lambda: self.stack.content, "stack.json is there", 60.0)
        self.stack.wait_ready()

    def stop(self) -> None:
        for trainer in self._trainers:
            trainer.kill()
        if self._launcher is not None:
            self._launcher.kill()
            self._launcher.wait(20)
        self.stack.clean_up()

    def trainer(self, ranks: int = 1, **changes: Any) -> TrainerProcess:
        """Starts one; `changes` are keys of the experiment file, for this life."""
        config = OmegaConf.load(self.run_dir / "config.yaml")
        for key, value in changes.items():
            OmegaConf.update(config, key.replace("__", "."), value)
        file = self._cwd / f"{self.run_dir.name}.yaml"
        OmegaConf.save(config, file)
        log = self._cwd / f"{self.run_dir.name}-trainer.log"
        process = TrainerProcess(file, self.trainer_address, ranks, log)
        self._trainers.append(process)
        return process

    def finish(self, ranks: int = 1, timeout: float = 180.0, **changes: Any) -> None:
        """A trainer's life to its good end."""
        code = self.trainer(ranks, **changes).popen.wait(timeout)
        assert code == 0, self.trainer_log[-4000:]

    def prefill(self, count: int) -> list[str]:
        """Submits and completes tasks as a rollout worker would; returns their digests in order.

        Some more it rejects.
        """
        return asyncio.run(self._prefill(count))

    async def _prefill(self, count: int) -> list[str]:
        client = BufferClient(self.stack.address("buffer"), self.stack.security)
        ids = [f"e0-{number}" for number in range(count)]
        spec = WorkflowSpec(name="rlvr")
        self.rejected = [f"x-{number}" for number in range(count // 4)]
        others = [Task(i, Purpose.TRAIN, spec, {}) for i in self.rejected]
        try:
            await client.submit_tasks(others)
            await client.submit_tasks([Task(i, Purpose.TRAIN, spec, {}) for i in ids])
            digests: dict[str, str] = {}
            while len(digests) < count:
                leases, reason = await client.lease_tasks("prefill", 64, 60.0)
                assert leases, f"{len(digests)} of {count} leased: {reason}"
                for lease in leases:
                    task_id = lease.task.task_id
                    if task_id in self.rejected:
                        group = synthetic_group(task_id, 0)
                        await client.reject_task(task_id, lease.token, "too easy", group)
                        continue
                    group = synthetic_group(task_id, int(task_id.removeprefix("e0-")))
                    digests[task_id] = digest_of(group)
                    await client.complete_task(task_id, lease.token, group, "prefill")
        finally:
            await client.close()
        return [digests[i] for i in ids]

    def seen(self) -> list[dict[str, Any]]:
        """What every life of the trainer has written down so far."""
        file = self.run_dir / "seen.jsonl"
        text = file.read_text() if file.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def rows(self) -> list[dict[str, Any]]:
        """metrics.jsonl."""
        return [json.loads(x) for x in (self.run_dir / "metrics.jsonl").read_text().splitlines()]

    def counts(self) -> dict[str, int]:
        """The ledger's counters of train tasks."""

        async def ask() -> dict[str, int]:
            client = BufferClient(self.stack.address("buffer"), self.stack.security)
            try:
                stats = await client.get_stats()
            finally:
                await client.close()
            return {state.value: tasks for state, tasks in stats.train_counts.items()}

        return asyncio.run(ask())

    def batches_ahead(self) -> int:
        """Batches that were taken, of which no server serves the version yet."""

        async def ask() -> int:
            client = BufferClient(self.stack.address("buffer"), self.stack.security)
            try:
                stats = await client.get_stats()
            finally:
                await client.close()
            return stats.last_taken_step - stats.policy_version

        return asyncio.run(ask())

    def kill_at_random(self, rng: random.Random, last: int) -> str:
        """A trainer's life, killed somewhere up to step `last`; returns where, for people."""
        trainer = self.trainer(endless_step=last)
        if rng.random() < 0.25:
            delay = rng.uniform(0.0, 6.0)
            time.sleep(delay)
            where = f"{delay:.2f} s after its start"
        else:
            before, more, delay = len(self.seen()), rng.randint(1, 5), rng.uniform(0.0, 0.3)

            def enough() -> bool:
                new = self.seen()[before:]
                return len(new) >= more or any(line["step"] == last for line in new)

            eventually(
                lambda: trainer.popen.poll() is not None or enough(),
                f"{more} steps",
                90.0,
                lambda: self.trainer_log,
            )
            time.sleep(delay)
            where = f"{delay:.2f} s into step {self.seen()[-1]['step']}"
        assert trainer.popen.poll() is None, f"it ended by itself: {self.trainer_log[-3000:]}"
        trainer.kill()
        return where


@contextmanager
def trainer_rig(cwd: Path, trial: str, *overrides: str, generation: bool) -> Iterator[TrainerRig]:
    """A started rig; without generation no rollout worker, reward service or gateway runs."""
    nobody = (
        f"endpoints.rollout={NOBODY}",
        f"endpoints.reward={NOBODY}",
        f"endpoints.gateway=http://{NOBODY}",
    )
    rig = TrainerRig(cwd, trial, overrides if generation else (*nobody, *overrides))
    try:
        rig.start()
        yield rig
    finally:
        rig.stop()


@contextmanager
def whole_run(
    cwd: Path, trial: str, model: Path, *overrides: str
) -> Iterator[tuple[TrainerRig, subprocess.Popen[bytes]]]:
    """`areal run` of one trial, whose launcher starts trainers; it says what it does in run.log."""
    rig = TrainerRig(cwd, trial, ())
    launcher = areal_background(
        *("run", str(RECIPE), *rig.overrides, f"model.path={model}"),
        *("checkpoint.freq_steps=4", "pace_s=0.3", *overrides),
        cwd=cwd,
        log=cwd / "run.log",
    )
    try:
        yield rig, launcher
    finally:
        launcher.kill()
        launcher.wait(20)
        rig.stack.clean_up()
