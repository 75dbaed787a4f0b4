"""Finds a reward function, fits arguments to its signature, and judges what it returns."""

from __future__ import annotations

import inspect
import math
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from areal.errors import InvalidInput, Unavailable, nearest
from areal.protocol.trajectories import parse_json_object
from areal.rewards import builtin_reward
from areal.rewards.group import scores_group
from areal.types import Score
from areal.v1 import reward_service_pb2 as pb

_MAX_MESSAGE = 500
_MAX_TRACEBACK = 4000


class RewardFunction:
    """A function with its fixed keyword arguments.

    It is called by name with whatever of these its signature accepts: `prompt`, `completion`,
    `completions` (the same text), `prompt_ids`, `completion_ids`, the row's fields, and the fixed
    arguments, which win over a row's field of the same name. A `group_reward` gets lists of
    completions and of their ids.
    """

    def __init__(self, name: str, function: Callable[..., Any], kwargs: dict[str, Any]) -> None:
        """Reads the signature; raises InvalidInput for a fixed argument it does not accept.

        A class is instantiated with the fixed arguments; its object is then called.
        """
        self.name = name
        if inspect.isclass(function):
            function, kwargs = _made(name, function, kwargs), {}
        self._function = function
        self._kwargs = kwargs
        self.scores_group = scores_group(function)
        self.is_async = inspect.iscoroutinefunction(
            function if inspect.isroutine(function) else getattr(function, "__call__", function)  # noqa: B004
        )
        parameters = inspect.signature(function).parameters.values()
        self._takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        named = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        self._accepted = {p.name for p in named}
        self._required = {p.name for p in named if p.default is p.empty}
        code = getattr(inspect.unwrap(function), "__code__", None)
        self.file = str(code.co_filename) if code else ""
        self.where = f" ({code.co_filename}:{code.co_firstlineno})" if code else ""
        """" (file:line)" of its definition; "": it has no source."""
        self._positional = [p.name for p in named if p.kind is p.POSITIONAL_ONLY]
        for key in kwargs:
            if not self._takes_all and key not in self._accepted:
                raise InvalidInput(
                    f"reward {name!r}: has no argument {key!r}{nearest(key, self._accepted)}"
                )

    def wants(self, name: str) -> bool:
        """Whether the function accepts an argument of that name."""
        return self._takes_all or name in self._accepted

    def bind(self, item: pb.ScoreItem) -> tuple[list[Any], dict[str, Any]]:
        """Returns the arguments of one call; raises InvalidInput if a required one is missing."""
        if self.scores_group != bool(item.samples):
            expected = "a group" if self.scores_group else "one completion"
            raise InvalidInput(f"reward {self.name!r}: expected {expected} to score")
        known = parse_json_object(item.data_json, "data_json")
        known["prompt"] = item.prompt
        samples = item.samples
        known["completions"] = [s.completion for s in samples] if samples else item.completion
        known["completion"] = known["completions"]
        if self.wants("prompt_ids"):
            known["prompt_ids"] = list(item.prompt_ids)
        if self.wants("completion_ids"):
            known["completion_ids"] = (
                [list(s.completion_ids) for s in samples] if samples else list(item.completion_ids)
            )
        known.update(self._kwargs)
        for key in self._required:
            if key not in known:
                fields = sorted(set(known) - {"completions"})
                raise InvalidInput(
                    f"reward {self.name!r}: needs {key!r}, which the row does not have"
                    f"{nearest(key, fields)}"
                )
        if not self._takes_all:
            known = {key: value for key, value in known.items() if key in self._accepted}
        elif "completion" not in self._accepted and "completions" in self._accepted:
            del known["completion"]  # one text under two names confuses a **kwargs reader
        return [known.pop(key) for key in self._positional if key in known], known

    def call(self, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Calls it; the value may be an awaitable."""
        return self._function(*args, **kwargs)

    def result(self, value: Any, item: pb.ScoreItem) -> pb.ScoreResult:
        """The result of a call that returned `value`."""
        if not self.scores_group:
            return outcome(self.name, value, self.where)
        try:
            values = list(value)
        except TypeError:
            values = []
        if len(values) != len(item.samples):
            return failure(
                pb.SCORE_ERROR_FUNCTION,
                f"{self.name} returned {_short(value)}: expected {len(item.samples)} numbers, one "
                f"for each completion{self.where}",
            )
        group = pb.GroupReward()
        for index, each in enumerate(values):
            one = outcome(f"{self.name}, completion {index},", each, self.where)
            if one.HasField("failure"):
                return one
            group.samples.add(reward=one.reward, parts=one.parts)
        return pb.ScoreResult(group=group)


def _made(name: str, kind: type, kwargs: dict[str, Any]) -> Callable[..., Any]:
    """An object of a reward that is a class."""
    parameters = inspect.signature(kind).parameters
    for key in kwargs:
        if key not in parameters:
            raise InvalidInput(
                f"reward {name!r}: has no argument {key!r}{nearest(key, parameters)}"
            )
    missing = [key for key, p in parameters.items() if p.default is p.empty and key not in kwargs]
    if missing:
        raise InvalidInput(f"reward {name!r}: expected reward_kwargs with {', '.join(missing)}")
    made: Callable[..., Any] = kind(**kwargs)
    return made


def resolve(reward: pb.RewardSpec, recipe: ModuleType | None) -> RewardFunction:
    """Finds the function that a spec names.

    Args:
        reward: Name, digest and fixed arguments.
        recipe: The loaded recipe; None for a built-in.

    Raises:
        InvalidInput: The name is unknown, or the arguments are not a JSON object.
    """
    if recipe is None:
        function = builtin_reward(reward.name)
    else:
        from areal.recipe import find_function

        function = find_function(recipe, reward.name)
    return RewardFunction(
        reward.name, function, parse_json_object(reward.kwargs_json, "reward.kwargs_json")
    )


def outcome(name: str, value: Any, where: str = "") -> pb.ScoreResult:
    """Converts a function's return value to a result: a finite number, or a FUNCTION failure.

    Args:
        name: The function's name.
        value: What it returned.
        where: " (file:line)" of the function, or "".
    """
    if type(value) is float and math.isfinite(value):
        return pb.ScoreResult(reward=value)
    # Text has no __float__; numpy scalars and one-element arrays and tensors do.
    number = float(value) if hasattr(value, "__float__") else None
    if number is None or not math.isfinite(number):
        return failure(
            pb.SCORE_ERROR_FUNCTION,
            f"{name} returned {_short(value)}: expected a finite number{where}",
        )
    return pb.ScoreResult(reward=number, parts=value.parts if isinstance(value, Score) else None)


def raised(name: str, error: BaseException, file: str = "") -> pb.ScoreResult:
    """Converts an exception to a result; names the last line executed, in `file` if possible."""
    if isinstance(error, InvalidInput):
        return failure(pb.SCORE_ERROR_INVALID, str(error))
    if isinstance(error, Unavailable):  # what the function needs is away: try the task again
        return failure(pb.SCORE_ERROR_CRASH, f"{name}: {error}")
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not _calls(f.filename)]
    last = ([f for f in frames if f.filename == file] or frames)[-1:]
    where = "".join(f" ({frame.filename}:{frame.lineno})" for frame in last)
    kind = type(error).__name__
    try:
        said = str(error)
    except Exception as broken:  # the recipe's own __str__
        said = f"(its message could not be read: {type(broken).__name__})"
    text = " ".join(said.split())[:_MAX_MESSAGE]
    trace = "".join([*traceback.format_list(frames), f"{kind}: {said}\n"])
    return failure(
        pb.SCORE_ERROR_FUNCTION,
        f"{name} raised {kind}{': ' if text else ''}{text}{where}",
        trace[-_MAX_TRACEBACK:],
    )


def _calls(file: str) -> bool:
    """Whether a file is of those that call a function, rather than the function's own."""
    builtin = Path(__file__).parent
    ours = file.startswith(str(builtin.parent))  # areal/, areal_reward/
    return file == __file__ or (ours and Path(file).parent != builtin)


def failure(error: pb.ScoreError.ValueType, message: str, trace: str = "") -> pb.ScoreResult:
    """Returns the result of an item that has no reward."""
    return pb.ScoreResult(
        failure=pb.ScoreFailure(error=error, message=message[:2000], traceback=trace)
    )


def too_slow(name: str, timeout_s: float) -> str:
    """The message for a call that exceeded its time limit."""
    return f"{name} took longer than reward.timeout_s = {timeout_s:g} s"


def _short(value: Any) -> str:
    text = repr(value)
    text = text if len(text) <= 80 else text[:77] + "..."
    return text if value is None or isinstance(value, float) else f"{type(value).__name__} {text}"
