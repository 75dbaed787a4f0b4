"""Environments by name: NAME:REST of a library in the table `SOURCES`, or module:Class."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

from areal.errors import InvalidInput, nearest

_NUMBER = re.compile(r"-?\d+")


def find_environment(name: str) -> Callable[..., Any]:
    """Returns what creates the environment of that name.

    Raises:
        InvalidInput: The package or the name does not exist; the message says what to install.
    """
    source, _, rest = name.partition(":")
    if not source or not rest:
        forms = ", ".join(f"{known}:{each.form}" for known, each in SOURCES.items())
        raise InvalidInput(f"environment {name!r}: expected {forms} or module:Class")
    if source == "verifiers":
        raise InvalidInput(
            f"environment {name!r}: expected VerifiersWorkflow('tcp://HOST:PORT', gconfig): "
            f"the package's own server plays its episodes"
        )
    if source in SOURCES:
        return SOURCES[source].find(rest)
    module = _module(source, name)
    made = getattr(module, rest, None)
    if not callable(made):
        raise InvalidInput(
            f"environment {name!r}: no such class{nearest(rest, list(vars(module)))}"
        )
    return made  # type: ignore[no-any-return]  # of a module known at run time only


def reasoning_gym_rows(
    task: str, *, train: int, heldout: int, seed: int, **options: Any
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows of a reasoning-gym task; no question is in both parts.

    Args:
        task: Name of a reasoning-gym task ("chain_sum").
        train: Maximum number of rows in the first part.
        heldout: Maximum number of rows in the second part.
        seed: Seed of the generator; the same arguments give the same rows.
        **options: Options of the task (`min_terms=2`).

    Returns:
        (train rows, held-out rows): {"prompt": question, "answer": str, "entry": the generator's}.
        Where the task has fewer different questions, both parts shrink in proportion.

    Raises:
        InvalidInput: The package or the task does not exist, or the options do not fit.
    """
    find_environment(f"reasoning_gym:{task}")
    made = _module("reasoning_gym", f"reasoning_gym:{task}")
    try:
        entries = made.create_dataset(task, size=train + heldout, seed=seed, **options)
    except (AssertionError, TypeError, ValueError) as error:
        raise InvalidInput(f"reasoning_gym:{task} {options}: {error}") from None
    found = {entry["question"]: entry for entry in entries}
    rows = [
        {"prompt": question, "answer": entry["answer"], "entry": entry}
        for question, entry in found.items()
    ]
    held = len(rows) * heldout // max(1, train + heldout)
    return rows[held:], rows[:held]


class ReasoningGym:
    """A task of reasoning-gym: one question, one answer, scored by the task itself."""

    def __init__(self, score: Callable[[str, dict[str, Any]], float]) -> None:
        self._score = score
        self._entry: dict[str, Any] = {}

    def reset(self, data: dict[str, Any]) -> str:
        """Returns the question of a row of `reasoning_gym_rows`."""
        if "entry" not in data:
            raise InvalidInput("data: expected a row of reasoning_gym_rows, with 'entry'")
        self._entry = data["entry"]
        return str(self._entry["question"])

    def step(self, action: str) -> tuple[str, float, bool]:
        """Scores the answer, from 0 to 1."""
        return "", float(self._score(action.strip(), self._entry)), True


class Gymnasium:
    """A gymnasium environment: observations as `str` writes them, actions as whole numbers or text.

    The row's `seed` seeds it. If an answer has no action, the model reads what is expected, and the
    environment takes no step.
    """

    def __init__(self, name: str, **options: Any) -> None:
        gymnasium = _module("gymnasium", name)
        self._env = gymnasium.make(name, **options)
        self._space = self._env.action_space
        if not isinstance(self._space, (gymnasium.spaces.Discrete, gymnasium.spaces.Text)):
            raise InvalidInput(
                f"environment gymnasium:{name}: actions are {self._space}: "
                f"expected Discrete or Text"
            )

    def reset(self, data: dict[str, Any]) -> str:
        """Returns the first observation."""
        observation, _ = self._env.reset(seed=data.get("seed"))
        return str(observation)

    def step(self, action: str) -> tuple[str, float, bool]:
        """Takes the last number in the answer as the action, or the text itself."""
        done: Any = action
        if hasattr(self._space, "n"):
            numbers = _NUMBER.findall(action)
            done = int(numbers[-1]) if numbers else None
        if done is None or not self._space.contains(done):
            return f"expected an action of {self._space}", 0.0, False
        observation, reward, terminated, truncated, _ = self._env.step(done)
        return str(observation), float(reward), terminated or truncated

    def close(self) -> None:
        """Frees what the environment holds."""
        self._env.close()


def _reasoning_gym(task: str) -> Callable[..., Any]:
    name = f"reasoning_gym:{task}"
    module = _module("reasoning_gym", name)
    known = module.factory.DATASETS
    if task not in known:
        raise InvalidInput(f"environment {name!r}: no such task{nearest(task, known)}")
    # Once, not for each episode: it creates a dataset, and some read a whole book for that.
    return partial(ReasoningGym, module.get_score_answer_fn(task))


def _gymnasium(identifier: str) -> Callable[..., Any]:
    name = f"gymnasium:{identifier}"
    known = _module("gymnasium", name).registry
    if identifier not in known:
        raise InvalidInput(f"environment {name!r}: no such id{nearest(identifier, known)}")
    return partial(Gymnasium, identifier)


def _openenv(url: str) -> Callable[..., Any]:
    from areal.workflows.openenv import OpenEnv

    return partial(OpenEnv, url)


@dataclass(frozen=True)
class Source:
    """A library of environments: how a name in it is written, found, and described."""

    form: str
    """What follows the colon, in capitals."""
    find: Callable[[str], Callable[..., Any]]
    """Returns what creates the environment; raises InvalidInput. The library is imported here."""
    example: str
    rows: str
    """What the rows are, for docs/workflows.md."""
    plays: str
    """What the model reads and answers, for docs/workflows.md."""


SOURCES: dict[str, Source] = {
    "reasoning_gym": Source(
        "TASK",
        _reasoning_gym,
        "chain_sum",
        '`reasoning_gym_rows("chain_sum", train=2000, heldout=200, seed=0)` '
        "(`services/areal/workflows/gyms.py::reasoning_gym_rows`)",
        "the model reads the question; reasoning-gym scores its answer, and the episode ends",
    ),
    "gymnasium": Source(
        "ID",
        _gymnasium,
        "FrozenLake-v1",
        '`{"seed": 3}`',
        "the model reads each observation as formatted by `str`; the action is the last whole "
        "number in its answer, or the whole answer if the environment's actions are text",
    ),
    "openenv": Source(
        "URL",
        _openenv,
        "http://HOST:PORT",
        'what the environment\'s `reset` takes (`{"seed": 3}`)',
        '`options={"action": "message", "observation": "text"}` names the field that the answer '
        "fills and the field that the model reads; without these options, the model reads JSON and "
        "must answer in JSON",
    ),
}
"""The table of these libraries, by the name before the colon."""


def _module(name: str, wanted: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        raise InvalidInput(
            f"environment {wanted!r}: no module {missing!r}: pip install "
            f"{missing.replace('_', '-')}"
        ) from None
