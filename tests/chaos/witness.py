"""A client beside a training: every token of its answers is scored again by the version it names.

All versions are kept as the trainer publishes them. Tokens before an answer's first change of
version were sampled with keys and values of that version only, so that its weights alone must give
their logprobs, wherever and however often the request was continued. The control: the version
after it must not.

One thing is told apart: real SGLang holds requests that reach it during an update, and then finds
the beginning of their prompt where an earlier version has left it, under the key of that version.
Such an answer must agree with just that: so many tokens' keys and values by that version.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import statistics
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from tests.chaos.books import Check

from areal.clients.rollout import RolloutClient
from areal.types import Purpose, Task, Trajectory, WorkflowSpec

NEW_TOKENS = 40
ARITHMETIC = 1e-3
"""A logprob by the same weights, keys and values may differ so much between two engines."""
RLVR = {
    "reward_fn": "math",
    "gconfig": {"n_samples": 2, "max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS},
}


class Witness:
    """Asks, keeps what it was told and every version, and compares."""

    def __init__(self, run_dir: Path, first_version: Path, copies: Path) -> None:
        self._weights = run_dir / "weights"
        self._first = first_version
        self._copies = copies
        self._answers: list[Trajectory] = []

    async def ask(self, client: RolloutClient, ended: asyncio.Event) -> None:
        """One small task after the other until told to stop; the last one is waited for."""
        for number in count():
            if ended.is_set():
                return
            task = Task(
                f"witness-{number}",
                Purpose.SERVE,
                WorkflowSpec("rlvr", "", json.dumps(RLVR)),
                {"prompt": f"{10 + number % 90}+{10 + number // 90 % 90}=", "answer": "0"},
            )
            await client.submit_tasks([task])
            async for record in client.watch_tasks(
                [task.task_id], include_trajectories=True, timeout=120.0
            ):
                assert record.group is not None, record
                self._answers += record.group.trajectories
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), 0.2)

    async def keep_versions(self, ended: asyncio.Event) -> None:
        """Copies: the trainer removes all but the last few, and writes into their files again."""
        self._copies.mkdir(parents=True)
        while not ended.is_set():
            for folder in self._weights.glob("v*"):
                copy = self._copies / folder.name
                if copy.exists():
                    continue
                try:
                    shutil.copytree(folder, copy)
                except (shutil.Error, FileNotFoundError):  # removed meanwhile
                    shutil.rmtree(copy, ignore_errors=True)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), 0.1)

    def check(self, tolerance: float) -> Check:
        """Largest difference of a logprob from that of the version it names, and of the next.

        tolerance: of those that more than one earlier version's keys and values may explain.
        """
        own: list[float] = []
        following: list[float] = []
        unknown = changed = inherited = 0
        for answer in self._answers:
            at = np.flatnonzero(answer.loss_mask)
            versions = answer.token_versions[at]
            changed += int(versions[0] != versions[-1])
            at = at[versions == versions[0]]
            if (here := self._score(int(versions[0]), answer, at)) is None:
                unknown += 1
                continue
            off = float(np.abs(here - answer.behavior_logprobs[at]).max())
            if off > ARITHMETIC:
                found = self._inherited(int(versions[0]), answer, at)
                inherited += int(found < ARITHMETIC)
                off = min(off, found)
            own.append(off)
            if (then := self._score(int(versions[0]) + 1, answer, at)) is not None:
                following.append(float(np.abs(then - answer.behavior_logprobs[at]).max()))
        control = statistics.median(following) if following else 0.0
        detail = (
            f"{max(own, default=np.inf):.1e} off in {len(own)} answers, {changed} of them across "
            f"an update, {inherited} after a prompt that began under an earlier version; by the "
            f"version after it {control:.1e} in the median; {unknown} not kept"
        )
        holds = bool(own) and max(own) < tolerance < control and unknown <= len(own) // 10
        return Check("every token's logprob is that of the version it names", holds, detail)

    def _inherited(self, version: int, answer: Trajectory, at: np.ndarray[Any, Any]) -> float:
        """The least difference with some of the prompt by an earlier version."""
        differences = [np.inf]
        for earlier in range(max(0, version - 3), version):
            for length in range(1, int(at[0])):
                scored = self._score(version, answer, at, (earlier, length))
                if scored is not None:
                    differences.append(float(np.abs(scored - answer.behavior_logprobs[at]).max()))
        return min(differences)

    def _score(
        self,
        version: int,
        answer: Trajectory,
        at: np.ndarray[Any, Any],
        inherited: tuple[int, int] = (0, 0),
    ) -> np.ndarray[Any, Any] | None:
        """The logprobs of the tokens at these positions; None: a version is not there.

        inherited: the version whose keys and values the first so many tokens have.
        """
        import torch
        from transformers import DynamicCache

        length = inherited[1]
        model = self._model(version)
        before = self._model(inherited[0]) if length else None
        if model is None or (length and before is None):
            return None
        with torch.no_grad():
            ids = torch.from_numpy(answer.input_ids.astype(np.int64))[None]
            cache = DynamicCache()
            if before is not None:
                before(ids[:, :length], past_key_values=cache, use_cache=True)
            logits = model(ids[:, length:], past_key_values=cache, use_cache=True).logits[0]
            # `min_new_tokens` forbids the end, so it takes no part in what was sampled from.
            logits[:, model.config.eos_token_id] = -torch.inf
            logprobs = torch.log_softmax(logits.float(), -1)
            return logprobs[at - 1 - length, ids[0, at]].numpy()

    def _model(self, version: int) -> Any:
        found = sorted(self._copies.glob(f"v{version:08}-*")) if version else [self._first]
        return _load(found[-1]) if found else None


@lru_cache(maxsize=256)
def _load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
