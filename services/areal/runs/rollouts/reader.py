"""Reads kept rollouts: by step, by task, as text."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from itertools import groupby
from pathlib import Path
from typing import Any

from areal.errors import InvalidInput, NotFound, did_you_mean
from areal.runs.rollouts.records import DISCARDED, FILES, MODEL_KEY, TRAINED, step_of
from areal.tokenizer import Tokenizer
from areal.weights.objects import ObjectStore


@dataclass(frozen=True)
class Kept:
    """One trajectory; fields as the columns of `records`."""

    step: int
    incarnation: int
    task_id: str
    trajectory_id: str
    sample: int
    reward: float | None
    finish_reason: str | None
    completion: str | None
    input_ids: list[int] = field(repr=False)
    loss_mask: list[bool] = field(repr=False)
    logprobs: list[float] = field(repr=False)
    versions: list[int] = field(repr=False)
    rewards: list[float] = field(repr=False)
    advantages: list[float] | None = field(repr=False)
    parts: list[dict[str, Any]] = field(default_factory=list, repr=False)
    outcome: str = TRAINED
    cause: str | None = None
    turns: list[dict[str, Any]] | None = field(default=None, repr=False)
    split: str | None = None
    servers: list[str] = field(default_factory=list, repr=False)
    generation_s: float = 0.0
    queued_s: float = 0.0
    episode_s: float = 0.0
    score_s: float = 0.0

    @property
    def sampled(self) -> int:
        """Tokens that the policy sampled."""
        return sum(self.loss_mask)

    @property
    def advantage(self) -> float | None:
        """The mean advantage of the sampled tokens."""
        if self.advantages is None or not self.sampled:
            return None
        pairs = zip(self.advantages, self.loss_mask, strict=True)
        return sum(advantage for advantage, mask in pairs if mask) / self.sampled

    @property
    def head_version(self) -> int:
        """The smallest version that sampled one of its tokens; -1 if none was sampled."""
        return min((v for v in self.versions if v >= 0), default=-1)

    @property
    def prompt_ids(self) -> list[int]:
        """The tokens before the first sampled one."""
        first = self.loss_mask.index(True) if self.sampled else len(self.loss_mask)
        return self.input_ids[:first]

    def segments(self) -> Iterator[tuple[bool, list[int]]]:
        """Returns its ids in turns: (whether the policy sampled them, ids)."""
        pairs = zip(self.loss_mask, self.input_ids, strict=True)
        for sampled, part in groupby(pairs, key=lambda pair: pair[0]):
            yield bool(sampled), [token for _, token in part]


class RolloutFolder:
    """The `rollouts` folder of a run, or its copy in an object store."""

    def __init__(self, run: Path | ObjectStore) -> None:
        """Lists the files.

        Args:
            run: The run folder, or the store that has copies of the files in its `rollouts`.

        Raises:
            NotFound: Nothing was kept there.
            TransportError: The object store does not answer, or refuses.
        """
        self.store = run if isinstance(run, ObjectStore) else None
        self.folder = Path() if isinstance(run, ObjectStore) else run / "rollouts"
        names = self.store.files() if self.store else [each.name for each in self.folder.glob("*")]
        self.files = sorted(fnmatch.filter(names, FILES))
        if not self.files:
            raise NotFound(
                f"{self.run!r}: no rollouts; a run keeps them from its first finished step "
                "on (checkpoint.rollouts_gib above 0)"
            )
        self.steps = sorted({step_of(name) for name in self.files})
        self._discarded = sorted(fnmatch.filter(names, DISCARDED))
        self._tokenizer: Tokenizer | None = None

    @property
    def run(self) -> str:
        """The run folder's path, or the URL of the copies."""
        return self.store.url if self.store else str(self.folder.parent)

    def written_at(self) -> float:
        """Returns when the newest step's file was written, in seconds since the epoch."""
        newest = self.files[-1]
        if self.store:
            return self.store.written_at(newest)
        return (self.folder / newest).stat().st_mtime

    def read(self, steps: Sequence[int] | None = None, task_id: str = "") -> list[Kept]:
        """Trajectories that were trained on, in the order of steps and batches.

        Args:
            steps: Only of these; None: of all.
            task_id: Only of this task; "": of all.
        """
        return self._read(self.files, steps, task_id)

    def discarded(self, steps: Sequence[int] | None = None, task_id: str = "") -> list[Kept]:
        """Returns groups that were not trained on, in the order of their ends; some have no tokens.

        Args:
            steps: Only what ended before the batches of these steps were taken; None: all.
            task_id: As in `read`.
        """
        return self._read(self._discarded, steps, task_id)

    def groups(self, step: int | None = None) -> dict[str, list[Kept]]:
        """Returns the groups of one step by task; None: of the newest step.

        Raises:
            NotFound: The step is not kept.
        """
        step = self.steps[-1] if step is None else step
        if step not in self.steps:
            raise NotFound(f"step {step}: not kept; kept: {self.steps[0]} to {self.steps[-1]}")
        return by_task(self.read([step]))

    def task(self, task_id: str) -> list[Kept]:
        """Returns the trajectories of one task: first those of attempts that were discarded.

        Raises:
            NotFound: There is none of that name; names the nearest one.
        """
        if found := [*self.discarded(task_id=task_id), *self.read(task_id=task_id)]:
            return found
        known = {each.task_id for each in self.read(self.steps[-1:])}
        raise NotFound(
            f"task {task_id!r}: not among the groups of steps {self.steps[0]} to {self.steps[-1]}"
            f"{did_you_mean(task_id, known)}"
        )

    def turns(self, one: Kept) -> list[dict[str, Any]]:
        """Returns its stretches of given and sampled tokens: `sampled`, `tokens`, `text`."""
        if one.turns is not None:
            return one.turns
        return [
            {"sampled": sampled, "tokens": len(ids), "text": self.tokenizer().decode(ids)}
            for sampled, ids in one.segments()
        ]

    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the model that the ids belong to.

        Raises:
            InvalidInput: It is not there any more.
        """
        if self._tokenizer is None:
            self._tokenizer = Tokenizer.load(self._model())
        return self._tokenizer

    def model_name(self) -> str:
        """The model that the ids belong to, as the run named it."""
        from pyarrow import parquet

        metadata = parquet.read_schema(self._open(self.files[-1])).metadata or {}
        return str(metadata.get(MODEL_KEY, b""), "utf-8")

    def _model(self) -> Path:
        named = self.model_name()
        # A relative path was relative to where `areal run` was called: that of runs/NAME/TRIAL.
        for base in (Path(), self.folder.parents[3] if len(self.folder.parents) > 3 else Path()):
            if (base / named).is_dir():
                return base / named
        raise InvalidInput(
            f"model {named!r} of {self.run!r}: does not exist, so texts cannot be shown"
        )

    def _open(self, name: str) -> Path | BytesIO:
        return BytesIO(self.store.read(name)) if self.store else self.folder / name

    def _read(self, names: Sequence[str], steps: Sequence[int] | None, task_id: str) -> list[Kept]:
        from pyarrow import parquet

        filters = [("task_id", "=", task_id)] if task_id else None
        found: list[Kept] = []
        for name in names:
            if steps is None or step_of(name) in steps:
                table = parquet.read_table(self._open(name), filters=filters, partitioning=None)
                found += [Kept(**row) for row in table.to_pylist()]
        return found


def by_attempt(kept: Sequence[Kept]) -> dict[str, list[Kept]]:
    """Returns trajectories by group; a task that was tried again has several groups."""
    groups: dict[str, list[Kept]] = {}
    for each in kept:
        name = each.trajectory_id if each.reward is None else each.trajectory_id.rpartition(".")[0]
        groups.setdefault(f"{name} {each.outcome}", []).append(each)
    return groups


def by_task(kept: Sequence[Kept]) -> dict[str, list[Kept]]:
    """Returns trajectories by task, in their order."""
    groups: dict[str, list[Kept]] = {}
    for each in kept:
        groups.setdefault(each.task_id, []).append(each)
    return groups


def export_rows(folder: RolloutFolder, kind: str, steps: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Rows for other tools.

    Args:
        folder: The run folder.
        kind: `rows`: all trajectories with their text. `sft`: the best of each group whose rewards
            differ, as prompt and completion. `preferences`: prompt, its best (chosen) and its worst
            (rejected).
        steps: Which.
    """
    tokenizer = folder.tokenizer()

    def texts(one: Kept) -> tuple[str, str]:
        cut = len(one.prompt_ids)
        parts = tokenizer.decode_batch(
            [one.input_ids[:cut], one.input_ids[cut:]], skip_special_tokens=False
        )
        return parts[0], parts[1]

    for step in steps:
        for task_id, group in folder.groups(step).items():
            if kind == "rows":
                for one in group:
                    prompt, response = texts(one)
                    yield {**vars(one), "prompt": prompt, "response": response}
                continue
            best, worst = (pick(group, key=lambda one: one.reward or 0.0) for pick in (max, min))
            if best.reward == worst.reward:
                continue
            prompt, chosen = texts(best)
            about = {"task_id": task_id, "step": step}
            if kind == "sft":
                yield {"prompt": prompt, "completion": chosen, "reward": best.reward, **about}
            else:
                rejected = texts(worst)[1] if best.prompt_ids == worst.prompt_ids else None
                if rejected is not None:
                    yield {"prompt": prompt, "chosen": chosen, "rejected": rejected, **about}
