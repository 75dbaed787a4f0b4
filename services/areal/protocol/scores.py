"""Items to score, and their results. No grpc and no torch here: workflows import this."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class ScoreError(StrEnum):
    """Why an item has no reward."""

    FUNCTION = "function"
    """The reward function raised, or returned something that is not a finite number."""
    TIMEOUT = "timeout"
    """The call took longer than reward.timeout_s; the worker was ended."""
    CRASH = "crash"
    """The worker died (memory limit, os._exit, a fault in native code)."""
    INVALID = "invalid"
    """Unknown function or recipe, or arguments that do not fit."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One of the completions of a group."""

    completion: str
    completion_ids: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class ScoreItem:
    """What one call of a reward function scores: a completion, or a group of them.

    Example:
        >>> ScoreItem(prompt="12+30=", completion="42", data={"answer": "42"})
    """

    prompt: str
    completion: str
    prompt_ids: Sequence[int] = ()
    completion_ids: Sequence[int] = ()
    data: dict[str, Any] = field(default_factory=dict)
    """The dataset row: its fields reach the reward function as keywords. JSON types only."""
    samples: Sequence[Sample] = ()
    """A group, for a function that compares samples; `completion` is empty then."""


@dataclass(frozen=True, slots=True)
class ScoreFailure:
    """An item that got no reward; never treat it as reward 0.

    Example:
        >>> ScoreFailure(ScoreError.TIMEOUT, "reward_fn took longer than reward.timeout_s = 10 s")
    """

    error: ScoreError
    message: str
    traceback: str = ""
    """Stack trace of the reward function, bounded; may be empty."""
