"""A loss or an advantage function, built in or a recipe's own, called by its parameters' names.

    def my_loss(policy_logprobs, proximal_logprobs, advantages, loss_mask, *, tau):
        ratio = (policy_logprobs - proximal_logprobs).exp()
        return -advantages * ratio.clamp(max=tau)              # a loss for each token, [T]

    FSDPPPOActor(config.actor, loss=partial(my_loss, tau=config.tau))

A parameter gets the tensor of its name: one of those that the caller offers, or a key of the batch.
What `functools.partial` or a default sets is a constant. Importing this module loads no torch.
"""

from __future__ import annotations

import functools
import inspect
import traceback
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from areal.errors import ArealError, InvalidInput, WorkflowError, nearest
from areal.runs.metric_names import refuse_taken

if TYPE_CHECKING:
    from torch import Tensor

_OF_LOSSES = frozenset({"ppo_ratio", "clip_ratio", "dual_clip_ratio", "approx_kl"})
"""Statistics of the built-in losses; a recipe's own loss may have them as well."""


class Formula:
    """One function, with its place in a file for messages."""

    def __init__(
        self, function: Callable[..., Any], what: str, constants: Mapping[str, Any] | None = None
    ) -> None:
        """Reads the signature.

        Args:
            function: A function, or a `functools.partial` of one.
            what: `loss` or `advantages`.
            constants: Values for parameters of these names, unless a partial sets them.

        Raises:
            InvalidInput: It is no function, or its parameters cannot be read.
        """
        if not callable(function):
            raise InvalidInput(f"{what}={function!r}: expected a function, or a partial of one")
        self.function = function
        self._what = what
        try:
            self._parameters = list(inspect.signature(function).parameters.values())
        except (TypeError, ValueError) as error:
            raise InvalidInput(f"{what}={function!r}: {error}") from None
        fixed = function.keywords if isinstance(function, functools.partial) else {}
        self._fixed = frozenset(fixed)
        known = {each.name for each in self._parameters} - self._fixed
        self._constants = {
            name: value for name, value in (constants or {}).items() if name in known
        }

    @property
    def plain(self) -> Any:
        """The function itself, without partials and wrappers."""
        function: Any = self.function
        while isinstance(function, functools.partial):
            function = function.func
        return inspect.unwrap(function)

    def takes(self, name: str) -> bool:
        """Whether it has a parameter of this name, or any."""
        return any(
            each.name == name or each.kind is inspect.Parameter.VAR_KEYWORD
            for each in self._parameters
        )

    def __str__(self) -> str:
        """`loss my_loss (FILE:LINE)`."""
        function = self.plain
        code = getattr(function, "__code__", None)
        if code is None and not inspect.isbuiltin(function):  # an object that can be called
            code = getattr(getattr(function, "__call__"), "__code__", None)  # noqa: B004, B009
        name = getattr(function, "__qualname__", type(function).__qualname__)
        place = f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else ""
        return f"{self._what} {name}{place}"

    def __call__(self, offered: Mapping[str, Any]) -> Any:
        """Calls the function.

        Raises:
            InvalidInput: A parameter has neither a value nor a default, or a tensor was changed.
            WorkflowError: The function raised something; the line has the place.
        """
        import torch

        arguments, named = self._bind(offered)
        tensors = {name: each for name, each in offered.items() if isinstance(each, torch.Tensor)}
        versions = {name: each._version for name, each in tensors.items()}
        try:
            result = self.function(*arguments, **named)
        except (ArealError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            said = " ".join(f"{type(error).__name__}: {error}".split())[:800]
            raise WorkflowError(f"{self}: {said}{self._raised_at(error)}") from error
        if inspect.iscoroutine(result):
            result.close()  # what it is, is said below
        for name, each in tensors.items():
            if each._version != versions[name]:
                raise InvalidInput(
                    f"{self}: changed {name} in place: expected a new tensor "
                    f"(such as {name}.clone())"
                )
        return result

    def _bind(self, offered: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        kinds = inspect.Parameter
        arguments: list[Any] = []
        named: dict[str, Any] = {}
        for each in self._parameters:
            if each.kind is kinds.VAR_POSITIONAL or each.name in self._fixed:
                continue
            if each.kind is kinds.VAR_KEYWORD:
                mine = {other.name for other in self._parameters}
                named |= {name: value for name, value in offered.items() if name not in mine}
                continue
            if each.name in self._constants:
                value = self._constants[each.name]
                if each.name in offered:
                    raise InvalidInput(
                        f"{self}: parameter {each.name!r}: the batch has this key, and the "
                        f"configuration sets it to {value!r}: expected another name for one of them"
                    )
            elif each.name in offered:
                value = offered[each.name]
            elif each.default is not kinds.empty:
                if each.kind is kinds.POSITIONAL_ONLY:  # those after it keep their places
                    arguments.append(each.default)
                continue
            else:
                raise InvalidInput(
                    f"{self}: parameter {each.name!r}: expected a tensor's name, or a constant set "
                    f"by functools.partial{nearest(each.name, offered)}"
                )
            if each.kind is kinds.POSITIONAL_ONLY:
                arguments.append(value)
            else:
                named[each.name] = value
        return arguments, named

    def _raised_at(self, error: BaseException) -> str:
        frames = traceback.extract_tb(error.__traceback__)[1:]  # the first is ours
        code = getattr(self.plain, "__code__", None)
        own = [each for each in frames if code is not None and each.filename == code.co_filename]
        found = own or frames
        return f" ({found[-1].filename}:{found[-1].lineno})" if found else ""

    # -- what comes back -----------------------------------------------------------------------

    def token_losses(
        self, result: Any, policy_logprobs: Tensor
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Checks what a loss returned: a tensor [T], or that and a dict of statistics [T].

        Raises:
            InvalidInput: Another type or shape, no gradient, or a statistic whose name is taken.
        """
        import torch

        losses: Any = result
        stats: Any = {}
        if isinstance(result, tuple) and len(result) == 2:
            losses, stats = result
        shape = tuple(policy_logprobs.shape)
        self._check_numbers("", losses, shape, " (the engine takes the mean)")
        if not (losses.is_floating_point() and losses.device == policy_logprobs.device):
            raise InvalidInput(
                f"{self}: returned {losses.dtype} on {losses.device}: expected floats on "
                f"{policy_logprobs.device}"
            )
        if policy_logprobs.requires_grad and not losses.requires_grad:
            raise InvalidInput(
                f"{self}: its result has no gradient: expected a function of policy_logprobs that "
                "is not detached"
            )
        if not isinstance(stats, Mapping):
            raise InvalidInput(
                f"{self}: statistics {type(stats).__name__}: expected a dict of tensors {shape}"
            )
        for name, value in stats.items():
            if name not in _OF_LOSSES:
                refuse_taken(name, str(self))
            self._check_numbers(f"statistic {name!r} ", value, shape, " (the row has the mean)")
            if value.is_complex():
                raise InvalidInput(f"{self}: statistic {name!r}: expected floats, not complex")
        assert isinstance(losses, torch.Tensor)
        return losses, stats

    def _check_numbers(self, of: str, value: Any, shape: tuple[int, ...], why: str) -> None:
        import torch

        expected = f"expected one number per token, a tensor {shape}{why}"
        if not isinstance(value, torch.Tensor):
            raise InvalidInput(f"{self}: {of}returned {type(value).__name__}: {expected}")
        if tuple(value.shape) != shape:
            raise InvalidInput(f"{self}: {of}has shape {tuple(value.shape)}: {expected}")

    def token_advantages(self, result: Any, batch: Mapping[str, Tensor]) -> Tensor:
        """Checks what an advantage function returned, and gives each token its sequence's.

        Returns:
            Float64 [T], 0 off the mask.

        Raises:
            InvalidInput: It is no tensor of floats [S] or [T].
            WorkflowError: Something in it is not finite, although the rewards are.
        """
        import torch

        from areal_torch.algorithms.packing import sequence_index

        mask, sequences = batch["loss_mask"], len(batch["group_index"])
        if not isinstance(result, torch.Tensor) or not result.is_floating_point():
            got = result.dtype if isinstance(result, torch.Tensor) else type(result).__name__
            raise InvalidInput(f"{self}: returned {got}: expected a tensor of floats")
        if tuple(result.shape) not in {(sequences,), tuple(mask.shape)}:
            raise InvalidInput(
                f"{self}: returned shape {tuple(result.shape)}: expected [{sequences}], one number "
                f"per sequence, or [{len(mask)}], one per token"
            )
        each = result.detach().to(mask.device, torch.float64)
        if len(each) != len(mask):
            each = each[sequence_index(batch["cu_seqlens"])]
        each = torch.where(mask, each, 0.0)
        bad = ~torch.isfinite(each.float())  # as which they go on
        if bool(bad.any()) and bool(torch.isfinite(batch["rewards"]).all()):
            raise WorkflowError(
                f"{self}: returned {float(each[bad][0])} for {int(bad.sum())} of "
                f"{int(mask.sum())} loss tokens: expected finite float32 numbers"
            )
        return each
