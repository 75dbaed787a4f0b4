"""One row through everything between the recipe's loop and a batch, as rollout workers do it.

row ── JSON ──> workflow, rebuilt from its description ── arun_episode ──> trajectories
│ agenerate: FakePolicy    │ score: the reward, here       │
v                          v                               v
real tokenizer             finite numbers           what the ledger checks
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from areal.config.experiment import GRPOConfig
from areal.errors import InvalidInput
from areal.protocol.leases import Lease, ReturnCause
from areal.protocol.trajectories import (
    MAX_GROUP_BYTES,
    pack_group,
    task_from_pb,
    task_to_pb,
    unpack_group,
)
from areal.recipe import Recipe, load_recipe
from areal.tokenizer import Tokenizer
from areal.types import Purpose, Task, TrajectoryGroup
from areal.workflows.base import RolloutWorkflow
from areal.workflows.specs import build_workflow, describe_workflow
from areal_rollout.check.fakes import FakePolicy, InProcessScorer
from areal_rollout.check.report import Report
from areal_rollout.check.stand_ins import Sample
from areal_rollout.episode import EpisodeEngine
from areal_rollout.failures import describe_failure, leading_error, where_it_waits
from areal_rollout.results import group_of

WORKFLOW_S = 20.0
"""Seconds for one episode whose model answers at once; a workflow that waits longer is not
judged."""


class RowCheck:
    """Checks the rows of one recipe."""

    def __init__(
        self, config: GRPOConfig, recipe: Recipe, tokenizer: Tokenizer, report: Report
    ) -> None:
        self._config = config
        self._recipe = recipe
        self._tokenizer = tokenizer
        self._report = report

    def check(self, sample: Sample) -> None:
        """Reports workflow, reward and packing of a row."""
        report = self._report
        report.of(sample.of)
        try:
            workflow, task, module = self._rebuilt(sample)
        except InvalidInput as error:
            report.found("workflow", "failed", str(error))
            return
        scorer = InProcessScorer(module, self._config.reward.timeout_s, report)
        policy = FakePolicy(self._tokenizer, self._config.model.context_length)
        engine = EpisodeEngine(policy, scorer, self._tokenizer, group=task.task_id, min_version=0)
        lease = Lease(task, token=1, policy_version=0, time_to_live_s=WORKFLOW_S)
        name = type(workflow).__name__
        late = f"{name} had not finished a row after {WORKFLOW_S:g} s: not checked"
        try:
            with report.within(WORKFLOW_S, "workflow", "unknown", late):
                group = asyncio.run(self._episode(workflow, engine, lease))
        except _Late as waiting:
            report.found("workflow", "unknown", f"{late}; it was waiting at {waiting}")
            return
        except (Exception, SystemExit) as error:
            self._failed(error, scorer)
            return
        said = f"{name}: {policy.answers} answer{'s' * (policy.answers != 1)} from a fake policy"
        if group is None:
            report.found("workflow", "ok", f"{said}; it rejects this row")
            return
        report.found("workflow", "ok", said)
        rewards = [trajectory.reward for trajectory in group.trajectories]
        try:
            packed = self._packed(group)
        except InvalidInput as error:
            report.found("packing", "failed", str(error))
            return
        scored_by = scorer.name or "the workflow itself"
        spread = f"{min(rewards):g} to {max(rewards):g}"
        report.found("reward", "ok", f"{scored_by}: {spread}")
        report.found("packing", "ok", packed)

    def _rebuilt(self, sample: Sample) -> tuple[RolloutWorkflow, Task, Any]:
        """Rebuilds workflow, task and module from descriptions, as a rollout worker does."""
        if not isinstance(sample.workflow, RolloutWorkflow):
            kind = type(sample.workflow).__name__
            raise InvalidInput(f"workflow {kind}: expected an object of a RolloutWorkflow class")
        spec = describe_workflow(sample.workflow)
        module = None
        if spec.recipe_digest:
            module = load_recipe(self._recipe.source, self._recipe.file_name)
        workflow = build_workflow(spec, module)
        try:
            task = Task("e0-0", Purpose.TRAIN, spec, sample.row, position=(0, 0))
            return workflow, task_from_pb(task_to_pb(task)), module
        except (TypeError, InvalidInput) as error:
            raise InvalidInput(f"row: {error}") from None

    async def _episode(
        self, workflow: RolloutWorkflow, engine: EpisodeEngine, lease: Lease
    ) -> TrajectoryGroup | None:
        episode = asyncio.ensure_future(workflow.arun_episode(engine, lease.task.data))
        done, _ = await asyncio.wait({episode}, timeout=WORKFLOW_S - 1)
        if not done:
            where, _ = where_it_waits(episode)
            episode.cancel()
            raise _Late(where)
        return group_of(episode.result(), lease, workflow.arun_episode)

    def _failed(self, error: BaseException, scorer: InProcessScorer) -> None:
        """Returns the failure of the reward, if that has failed; else of the workflow."""
        reward = scorer.failure
        if reward is not None:
            self._report.found("reward", "failed", reward.message, reward.traceback)
            return
        failure = describe_failure(error)
        verdict = "unknown" if failure.cause is ReturnCause.INFRASTRUCTURE else "failed"
        # Of a bad row, the line says it all; the traceback is of our own code, unless the recipe
        # (the failure's site) passed the row on.
        mine = not failure.site and isinstance(leading_error(error), InvalidInput)
        trace = "" if mine else failure.traceback
        self._report.found("workflow", verdict, failure.detail, trace)

    def _packed(self, group: TrajectoryGroup) -> str:
        """Checks a group as the ledger and the trainer do; raises InvalidInput."""
        payload = pack_group(group)
        if len(payload) > MAX_GROUP_BYTES:
            raise InvalidInput(f"the group has {len(payload)} bytes: at most {MAX_GROUP_BYTES}")
        trajectories = unpack_group(payload).trajectories
        vocabulary, context = self._tokenizer.vocab_size, self._config.model.context_length
        for number, each in enumerate(trajectories):
            ids = each.input_ids
            if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
                bad = int(ids[(ids < 0) | (ids >= vocabulary)][0])
                raise InvalidInput(
                    f"trajectory {number} input_ids: token id {bad} is outside 0..{vocabulary - 1}"
                )
            if ids.size > context:
                raise InvalidInput(
                    f"trajectory {number}: {ids.size} tokens: expected at most {context} "
                    "(model.context_length)"
                )
            if each.head_version < 0:
                raise InvalidInput(f"trajectory {number}: no token was sampled by the policy")
        trained = sum(int(np.count_nonzero(each.loss_mask)) for each in trajectories)
        if not trained:
            raise InvalidInput("loss_mask: False everywhere, so nothing would be learned")
        tokens = sum(each.input_ids.size for each in trajectories)
        which = "1 trajectory" if len(trajectories) == 1 else f"{len(trajectories)} trajectories"
        return f"{which}, {tokens} tokens, {trained} of them in the loss"


class _Late(Exception):
    """An episode that waits for something; says where."""
