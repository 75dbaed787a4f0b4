"""Every error that crosses a module or a process boundary.

    ArealError
    ├── InvalidInput          the caller sent something wrong: names field, value, expectation
    │   └── ConfigError       the same in a configuration file or override
    ├── CannotStart           valid, but impossible here: names what is missing or in the way
    ├── NotFound              no such task, recipe, server, version
    ├── Unauthenticated       no bearer token, or a wrong one
    ├── StaleIncarnation      a newer trainer has registered; this one must stop
    ├── LeaseLost             the task was re-leased, cancelled or has ended
    ├── WrongStep             take or commit out of order
    ├── CapacityExceeded      a stated limit (memory, message size, queue) would be passed
    ├── Unavailable           try the same call again: draining, or a dependency is away
    ├── WaitTimeout           a deadline passed; says what, on whom, since when
    ├── TrainingDiverged      several gradients in a row are not finite; a restart would not help
    └── WorkflowError         user code (workflow, reward) raised, or returned nonsense
        └── PromptDrift       a later turn's prompt does not begin with the tokens before it

The gRPC chassis maps each class to a status code and clients map it back, so a caller catches the
same class on either side of the wire.
"""

from __future__ import annotations

import difflib
import re
import time
from collections.abc import Iterable, Sequence
from typing import Any

_TRY_AGAIN = re.compile(r"; try again in (\d+(?:\.\d+)?) s$")


class ArealError(Exception):
    """Base of all errors of this package; `str(error)` is one clear line."""


class InvalidInput(ArealError):
    """The caller sent something wrong."""


class ConfigError(InvalidInput):
    """A configuration key or value is wrong."""


class CannotStart(ArealError):
    """The request is valid, but a model, folder, program or port is missing or taken."""


class NotFound(ArealError):
    """The named thing does not exist."""


class Unauthenticated(ArealError):
    """A call carried no bearer token, or a wrong one."""


class StaleIncarnation(ArealError):
    """A newer trainer has registered."""


class LeaseLost(ArealError):
    """The lease's task was leased to another worker, was cancelled, or has ended."""


class WrongStep(ArealError):
    """A take or commit came out of order."""


class CapacityExceeded(ArealError):
    """The call would exceed a stated limit."""

    @property
    def retry_after_s(self) -> float | None:
        """Seconds until the same call may be tried again; None if it would be refused again.

        It is read from the end of the message, because every transport carries the message
        unchanged.
        """
        found = _TRY_AGAIN.search(str(self))
        return float(found[1]) if found else None


class Unavailable(ArealError):
    """A service does not answer now; try the same call again."""


class WorkflowError(ArealError):
    """User code raised, or returned something that makes no sense.

    Attributes:
        traceback: where it failed, for the list of dead letters; may be empty.
    """

    def __init__(self, message: str, traceback: str = "") -> None:
        super().__init__(message)
        self.traceback = traceback


class PromptDrift(WorkflowError):
    """A later turn's prompt does not begin with the tokens before it."""


class TrainingDiverged(ArealError):
    """Several optimizer steps in a row had a gradient that is not finite; every rank raises it.

    Attributes:
        cause: whether the loss, gradient, logprobs or inputs are not finite, and on which ranks.
        batch: this rank's batch of the last of these steps.
        groups: values of `group_index` in the batch whose inputs are not finite.
    """

    def __init__(
        self, message: str, *, cause: str = "", batch: Any = None, groups: Sequence[int] = ()
    ) -> None:
        super().__init__(message)
        self.cause, self.batch, self.groups = cause, batch, tuple(groups)


class WaitTimeout(ArealError):
    """A deadline passed.

    Example:
        >>> raise WaitTimeout("batch of step 12", on="buffer 127.0.0.1:7001", since=t0, hint="...")
        waited 30.0 s for batch of step 12 on buffer 127.0.0.1:7001 (...)
    """

    def __init__(
        self, what: str, *, on: str = "", since: float | None = None, hint: str = ""
    ) -> None:
        """Builds the message.

        Args:
            what: The thing waited for.
            on: The process that should have delivered it.
            since: `time.monotonic()` when the wait began.
            hint: What to look at.
        """
        text = "waited "
        if since is not None:
            text += f"{time.monotonic() - since:.1f} s "
        text += f"for {what}"
        if on:
            text += f" on {on}"
        if hint:
            text += f" ({hint})"
        super().__init__(text)


def did_you_mean(name: str, options: Iterable[str]) -> str:
    """Returns `; did you mean 'x'?`, or "".

    Of two equally near names it is the one with the same letters (`pop` for `ppo`), or the first.
    """

    def likeness(option: str) -> tuple[float, bool]:
        ratio = difflib.SequenceMatcher(None, name, option).ratio()
        return ratio, sorted(option) == sorted(name)

    best = max(options, key=likeness, default="")
    return f"; did you mean {best!r}?" if likeness(best)[0] >= 0.5 else ""


def nearest(name: str, options: Iterable[str]) -> str:
    """Returns the end of an error message: the option that `name` may mean, or all options."""
    known = sorted(options)
    return did_you_mean(name, known) or (f"; expected one of {', '.join(known)}" if known else "")
