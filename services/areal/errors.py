"""Every error that crosses a module or a process boundary.

    ArealError
    ├── InvalidInput          the caller sent something wrong: names field, value, expectation
    │   ├── ConfigError       the same in a configuration file or override
    │   └── PromptTooLong     a prompt leaves no room for an answer in the model's context
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

Each class has a gRPC code, an HTTP status and a kind; a subclass inherits those that it does not
set. All servers and clients read them here, so a caller catches the same class on either side of
the wire. A class that only its own service knows arrives as the nearest base class above.
"""

from __future__ import annotations

import difflib
import math
import re
import time
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

ERROR_KEY = "areal-error"
"""Key of a failed gRPC call's trailing metadata: the error's `name_of`."""
_TRY_AGAIN = re.compile(r"; try again in (\d+(?:\.\d+)?) s$")


class ArealError(Exception):
    """Base class of all AReaL errors; `str(error)` is one line.

    Attributes:
        grpc_code: The name of its gRPC status code.
        http_status: Its HTTP status.
        kind: The `type` of the error in replies to agents, in OpenAI's words.
    """

    grpc_code: ClassVar[str] = "UNKNOWN"
    http_status: ClassVar[int] = 500
    kind: ClassVar[str] = "server_error"


class InvalidInput(ArealError):
    """An argument, row or request is wrong; the message says which one and what was expected."""

    grpc_code = "INVALID_ARGUMENT"
    http_status = 400
    kind = "invalid_request_error"


class ConfigError(InvalidInput):
    """A configuration key or value is wrong; the message says which one and what was expected."""


class PromptTooLong(InvalidInput):
    """A prompt leaves no room for an answer in the model's context.

    Attributes:
        tokens: Length of the prompt, in tokens; a lower bound where its texts show that it is too
            long, and are not all encoded.
        limit: Length of the model's context, in tokens.
    """

    def __init__(self, message: str, *, tokens: int = 0, limit: int = 0) -> None:
        super().__init__(message)
        self.tokens, self.limit = tokens, limit


class CannotStart(ArealError):
    """A model, folder, program, package or port needed to start is missing or already in use."""


class NotFound(ArealError):
    """The requested task, recipe, session, run, program or policy version does not exist."""

    grpc_code = "NOT_FOUND"
    http_status = 404
    kind = "not_found_error"


class Unauthenticated(ArealError):
    """A call to a service had no bearer token, or had a wrong one."""

    grpc_code = "UNAUTHENTICATED"
    http_status = 401
    kind = "authentication_error"


class StaleIncarnation(ArealError):
    """A newer trainer of the same run has registered, so this trainer must stop."""

    grpc_code = "FAILED_PRECONDITION"


class LeaseLost(ArealError):
    """A worker lost its lease: the task ended, was cancelled, or was leased to another worker."""

    grpc_code = "FAILED_PRECONDITION"
    http_status = 410
    kind = "session_ended"


class WrongStep(ArealError):
    """The trainer took a batch, committed a step or published a version out of order."""

    grpc_code = "FAILED_PRECONDITION"


class CapacityExceeded(ArealError):
    """A call would exceed a limit (memory, message size, queue); the message names the limit."""

    grpc_code = "RESOURCE_EXHAUSTED"
    http_status = 429
    kind = "rate_limit_error"

    @property
    def retry_after_s(self) -> float | None:
        """Seconds to wait before repeating the same call; None if it would be refused again.

        The number comes from the end of the message ("try again in 5 s").
        """
        found = _TRY_AGAIN.search(str(self))
        return float(found[1]) if found else None


class Unavailable(ArealError):
    """A service does not answer at the moment; the same call may succeed later."""

    grpc_code = "UNAVAILABLE"
    http_status = 503
    kind = "overloaded_error"


class WorkflowError(ArealError):
    """A workflow, reward, tool or environment raised an error or returned an unusable value.

    Attributes:
        traceback: The Python traceback of the failure, shown with the dead letter; may be empty.
    """

    grpc_code = "ABORTED"

    def __init__(self, message: str, traceback: str = "") -> None:
        super().__init__(message)
        self.traceback = traceback


class PromptDrift(WorkflowError):
    """The prompt of a later turn does not begin with the previous prompt and output."""


class TrainingDiverged(ArealError):
    """The gradients of several steps in a row were not finite; every rank raises this error.

    The limit is 3 steps by default (`OptimizerConfig.max_skipped_steps`, which can be set only in
    code).

    Attributes:
        cause: What is not finite (inputs, logprobs, loss or gradient), and on which ranks.
        batch: This rank's batch in the last of these steps.
        groups: The `group_index` of each group in `batch` whose inputs are not finite.
    """

    def __init__(
        self, message: str, *, cause: str = "", batch: Any = None, groups: Sequence[int] = ()
    ) -> None:
        super().__init__(message)
        self.cause, self.batch, self.groups = cause, batch, tuple(groups)


class WaitTimeout(ArealError):
    """A deadline passed; the message says how long the caller waited, for what, and on what.

    Example:
        >>> since = time.monotonic() - 30
        >>> str(WaitTimeout("batch of step 12", on="buffer 127.0.0.1:7001", since=since))
        'waited 30.0 s for batch of step 12 on buffer 127.0.0.1:7001'
    """

    grpc_code = "DEADLINE_EXCEEDED"
    http_status = 504
    kind = "timeout_error"

    def __init__(
        self, what: str, *, on: str = "", since: float | None = None, hint: str = ""
    ) -> None:
        """Composes the message.

        Args:
            what: What the caller waited for.
            on: The process or resource that the caller waited on; left out if empty.
            since: `time.monotonic()` when the wait began, in seconds. If None, the message does not
                say how long the caller waited.
            hint: Where to look for the cause, shown in parentheses; left out if empty.
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


def retry_headers(error: Exception) -> dict[str, str]:
    """Returns the header that says when to repeat a refused call; {} if that is not known.

    gRPC's trailing metadata have it in lower case.
    """
    if isinstance(error, CapacityExceeded) and error.retry_after_s is not None:
        return {"Retry-After": str(math.ceil(error.retry_after_s))}
    return {}


def name_of(error: ArealError) -> str:
    """Returns the name under which an error crosses a process boundary; see `restore`.

    The receiver may not have a class of another module, so that class gets the name of its nearest
    base class in this module.
    """
    return next(each.__name__ for each in type(error).__mro__ if each.__module__ == __name__)


def named(name: str) -> type[ArealError] | None:
    """Returns the error class of this name; None if there is none, as in an older version."""
    found = globals().get(name)
    return found if isinstance(found, type) and issubclass(found, ArealError) else None


def restore(name: str, message: str) -> ArealError:
    """Returns the error that another process described by its `name_of` and its message."""
    kind = named(name) or ArealError
    # The constructor of WaitTimeout would compose a message out of this one.
    return WaitTimeout.__new__(WaitTimeout, message) if kind is WaitTimeout else kind(message)


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
