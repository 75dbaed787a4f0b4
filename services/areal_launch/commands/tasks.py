"""`areal submit`: submits tasks and reads their results through the services' APIs."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import sys
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from areal.chassis.backoff import Backoff
from areal.clients.buffer.connection import BufferConnection
from areal.clients.buffer.tasks import BufferRecipes
from areal.clients.rollout import RolloutClient
from areal.config.experiment import GRPOConfig, load_service_config
from areal.errors import CapacityExceeded, InvalidInput, NotFound, Unavailable, WaitTimeout
from areal.protocol.leases import TaskRecord
from areal.recipe import Recipe, load_recipe
from areal.security import Security
from areal.types import GenerationHyperparameters, Purpose, Task, TaskState, WorkflowSpec
from areal.workflows.specs import build_workflow, find_workflow
from areal_launch.run_folder import find_run
from areal_launch.view.output import print_event, say

_TASK_ID = re.compile(r"[A-Za-z0-9._:-]{1,200}")
# The keys of a line that has "data", each with what is expected and a check of the value. In a line
# without "data" the whole object is the data.
_KEYS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "data": ("a JSON object", lambda v: isinstance(v, dict)),
    "kwargs": ("a JSON object", lambda v: v is None or isinstance(v, dict)),
    "purpose": (" or ".join(Purpose), lambda v: v in list(Purpose)),
    "task_id": (
        "1 to 200 characters: letters, digits, ._:-",
        lambda v: isinstance(v, str) and _TASK_ID.fullmatch(v),
    ),
    "time_to_live_s": (
        "a number above 0",
        lambda v: v is None or (isinstance(v, int | float) and v > 0),
    ),
    "workflow": ("a name", lambda v: isinstance(v, str) and v),
}
# Tasks per call: far below the largest message that a service accepts.
_CHUNK = 2000

Describe = Callable[[str], WorkflowSpec]


@dataclass(frozen=True)
class SubmitOptions:
    """Options from the command line, which apply to every line of the file."""

    workflow: str = "rlvr"
    reward: str = ""
    """A built-in's name; empty: the recipe's `reward_fn` if it has one, else "math"."""
    recipe: Path | None = None
    wait: bool = False
    timeout_s: float = 3600.0
    as_json: bool = False


def parse_tasks(
    lines: Iterable[str],
    source: str,
    default: WorkflowSpec,
    prefix: str,
    describe: Describe,
) -> list[Task]:
    """Reads JSON Lines; blank lines are skipped.

    Args:
        lines: Lines with one JSON object each.
        source: The file's name, for errors.
        default: The workflow of rows that name none, and the recipe of all.
        prefix: Prefix of ids for rows that have none: `prefix-LINE`.
        describe: Returns the workflow of a name, with the arguments for rows without `kwargs`.

    Raises:
        InvalidInput: `source:LINE:` and what is wrong there.
    """
    tasks = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{source}:{number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise InvalidInput(f"{where}: not JSON: {error}") from None
        if not isinstance(row, dict):
            raise InvalidInput(f"{where}: expected a JSON object, got {type(row).__name__}")
        tasks.append(_parse_task(row, where, default, f"{prefix}-{number}", describe))
    if not tasks:
        raise InvalidInput(f"{source}: has no tasks, expected one per line")
    return tasks


def _parse_task(
    row: dict[str, Any], where: str, default: WorkflowSpec, name: str, describe: Describe
) -> Task:
    if "data" not in row:
        task_id = row.pop("task_id", name)
        row = {"task_id": task_id, "data": row}
    for key, value in row.items():
        if key not in _KEYS:
            raise InvalidInput(
                f"{where}: unknown key {key!r} next to 'data'; expected {', '.join(_KEYS)}"
            )
        expected, fits = _KEYS[key]
        if not fits(value):
            raise InvalidInput(f"{where}: {key} {value!r}: expected {expected}")
    workflow, kwargs = row.get("workflow", default.name), row.get("kwargs")
    try:
        spec = (
            describe(workflow)
            if kwargs is None
            else WorkflowSpec(workflow, default.recipe_digest, json.dumps(kwargs))
        )
    except InvalidInput as error:
        raise InvalidInput(f"{where}: {error}") from None
    return Task(
        task_id=row.get("task_id", name),
        purpose=Purpose(row.get("purpose", Purpose.SERVE)),
        workflow=spec,
        data=row["data"],
        time_to_live_s=row.get("time_to_live_s"),
    )


def submit_file(run: Path | None, file: Path, options: SubmitOptions) -> int:
    """Submits a file's tasks; exit code 1 if a task that it waited for was not delivered."""
    folder = find_run(run)
    if not folder.held():
        raise NotFound(f"{folder.path}: not running")
    config = load_service_config(folder.config_file)
    if str(file) == "-":
        text = sys.stdin.read()
    else:
        try:
            text = file.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidInput(f"{file}: {error}") from None
    recipe = Recipe.read(options.recipe) if options.recipe is not None else None
    default = WorkflowSpec(options.workflow, recipe.digest if recipe is not None else "")
    describe = partial(describe_workflow_named, recipe, config.gconfig, options.reward)
    prefix = f"submit-{uuid.uuid4().hex[:8]}"
    tasks = parse_tasks(text.split("\n"), str(file), default, prefix, cache(describe))
    return asyncio.run(_submit(config, tasks, recipe, options))


def describe_workflow_named(
    recipe: Recipe | None, gconfig: GenerationHyperparameters, reward: str, workflow: str
) -> WorkflowSpec:
    """Describes a workflow by name, with the arguments below that its constructor takes.

    Args:
        recipe: Defines the workflow, or its reward; None: built-ins only.
        gconfig: The stack's.
        reward: A built-in's name; empty: the recipe's `reward_fn` if it has one, else "math".
        workflow: A built-in's name, or a class of the recipe.

    Raises:
        InvalidInput: The recipe does not load, or it has no such workflow or reward.
    """
    module = load_recipe(recipe.source, recipe.file_name) if recipe is not None else None
    accepted = inspect.signature(find_workflow(workflow, module)).parameters
    kwargs: dict[str, Any] = {}
    if "gconfig" in accepted:
        kwargs["gconfig"] = asdict(gconfig)
    if "reward_fn" in accepted:
        own = callable(getattr(module, "reward_fn", None)) and not reward
        kwargs["reward_fn"] = {"$function": "reward_fn"} if own else (reward or "math")
    elif reward:
        raise InvalidInput(f"--reward {reward!r}: workflow {workflow!r} takes no reward_fn")
    spec = WorkflowSpec(
        name=workflow,
        recipe_digest=recipe.digest if recipe is not None else "",
        kwargs_json=json.dumps(kwargs),
    )
    build_workflow(spec, module)  # refuses what a worker would refuse
    return spec


async def _submit(
    config: GRPOConfig, tasks: list[Task], recipe: Recipe | None, options: SubmitOptions
) -> int:
    if recipe is not None:
        buffer = BufferConnection(config.endpoints.buffer, Security.load(config.security))
        try:
            await BufferRecipes(buffer).put_recipe(recipe.file_name, recipe.source)
        finally:
            await buffer.close()
    client = RolloutClient(config.endpoints.rollout, Security.load(config.security))
    try:
        return await _Submission(client, tasks, options).run()
    finally:
        await client.close()


class _Submission:
    """Submits tasks and reads results at the same time: results that are read make room for tasks.

    | wait     | on      | unblocked by                   | deadline  |
    |----------|---------|--------------------------------|-----------|
    | room     | ledger  | the time that its refusal says | --timeout |
    | the ends | rollout | the end of any task            | --timeout |
    """

    def __init__(self, client: RolloutClient, tasks: list[Task], options: SubmitOptions) -> None:
        self._client = client
        self._tasks = tasks
        self._options = options
        self._remaining = {task.task_id for task in tasks}
        self._known = 0
        self._states: Counter[TaskState] = Counter()
        self._rewards: list[float] = []
        self._accepted: list[str] = []
        """Tasks that were accepted and are not watched yet."""
        self._refusal = ""
        """The latest refusal of a full ledger; empty once there is room."""

    async def run(self) -> int:
        """Submits all tasks, waits for them if asked to, and returns the exit code."""
        options = self._options
        try:
            async with asyncio.timeout(options.timeout_s), asyncio.TaskGroup() as watchers:
                await self._send_all(watchers)
                if options.as_json:
                    print_event("submitted", tasks=len(self._tasks), known_already=self._known)
                else:
                    note = f", {self._known} were already known" if self._known else ""
                    say(f"submitted {len(self._tasks) - self._known} tasks{note}")
                self._watch_accepted(watchers)
        except TimeoutError:
            why = f"{self._refusal}; " if self._refusal else ""
            raise WaitTimeout(
                f"{len(self._remaining)} of {len(self._tasks)} tasks, e.g. {min(self._remaining)}",
                on=f"rollout {self._client.address}",
                hint=f"{why}--timeout {options.timeout_s:.0f}; see `areal status`",
            ) from None
        except ExceptionGroup as several:
            raise several.exceptions[0] from None
        return self._sum_up() if options.wait else 0

    async def _send_all(self, watchers: asyncio.TaskGroup) -> None:
        told = False
        for start in range(0, len(self._tasks), _CHUNK):
            chunk = self._tasks[start : start + _CHUNK]
            while chunk:
                try:
                    flags = await self._client.submit_tasks(chunk)
                except CapacityExceeded as error:
                    if error.retry_after_s is None:
                        raise
                    self._refusal = str(error)
                    if not told and not self._options.as_json:
                        say(f"waiting for room: {error}")
                    told = True
                    # The ledger may have accepted the first of them.
                    found = await self._client.get_tasks([task.task_id for task in chunk])
                    inside = {record.task.task_id for record in found}
                    self._accepted += inside
                    chunk = [task for task in chunk if task.task_id not in inside]
                    self._watch_accepted(watchers)
                    await asyncio.sleep(error.retry_after_s)
                else:
                    self._known += flags.count(False)
                    self._accepted += [task.task_id for task in chunk]
                    break
            self._refusal = ""

    def _watch_accepted(self, watchers: asyncio.TaskGroup) -> None:
        if not self._options.wait:
            return
        for start in range(0, len(self._accepted), _CHUNK):
            watchers.create_task(self._follow(set(self._accepted[start : start + _CHUNK])))
        self._accepted = []

    async def _follow(self, task_ids: set[str]) -> None:
        """Prints each task as it ends."""
        async for record in _watch(self._client, task_ids):
            self._remaining.discard(record.task.task_id)
            self._states[record.state] += 1
            samples = record.group.trajectories if record.group is not None else []
            self._rewards += [t.reward for t in samples]
            if self._options.as_json:
                print_event(
                    "task",
                    task_id=record.task.task_id,
                    state=record.state.value,
                    reason=record.reason,
                    samples=[
                        {"reward": t.reward, "completion": t.completion_text} for t in samples
                    ],
                )
            elif record.state is not TaskState.DELIVERED:
                say(f"{record.task.task_id}: {record.state.value} {record.reason}")

    def _sum_up(self) -> int:
        rewards = self._rewards
        counts = {state.value: count for state, count in self._states.items()}
        mean = sum(rewards) / len(rewards) if rewards else None
        if self._options.as_json:
            print_event("summary", counts=counts, samples=len(rewards), reward_mean=mean)
        else:
            ended = ", ".join(f"{count} {name}" for name, count in counts.items())
            score = "" if mean is None else f"; mean reward {mean:.3f} of {len(rewards)} samples"
            say(ended + score)
        return 0 if set(self._states) <= {TaskState.DELIVERED, TaskState.TRAINED} else 1


async def _watch(client: RolloutClient, remaining: set[str]) -> AsyncIterator[TaskRecord]:
    """Yields each task once, when it has ended; asks again if the service restarts meanwhile."""
    backoff = Backoff()
    while remaining:
        try:
            async for record in client.watch_tasks(sorted(remaining), include_trajectories=True):
                backoff.reset()
                remaining.discard(record.task.task_id)
                yield record
        except Unavailable:
            await backoff.sleep()  # the caller has the deadline
