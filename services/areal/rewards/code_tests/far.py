"""An object of the other process, as tests and code under test see it.

A bare interpreter runs this file inside a box; it imports nothing but the standard library and the
other files of this folder.
"""

import copy
import operator
import types
from collections.abc import Callable
from typing import Any

KINDS: dict[str, Any] = {
    str(kind.__name__): kind
    for kind in (
        *(int, float, complex, bool, str, bytes, bytearray, list, tuple, dict, set, frozenset),
        *(range, slice, object, map, filter, zip, enumerate, reversed, type(None)),
        *(types.FunctionType, types.MethodType, types.GeneratorType, type({}.values())),
    )
}
"""The kinds of object that a Far may claim to be; isinstance believes it."""


def _call(function: Any, arguments: tuple[Any, ...], named: tuple[Any, ...]) -> Any:
    return function(*arguments, **dict(named))


_BINARY = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"),
    *("and", "or", "xor", "lshift", "rshift"),
)
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_PLACES = tuple(f"i{stem}" for stem in _BINARY)
_UNARY = ("getitem", "setitem", "delitem", "neg", "pos", "abs", "invert", "index")
OPERATIONS: dict[str, Callable[..., Any]] = {
    stem: getattr(operator, f"__{stem}__")
    for stem in (
        *(*_BINARY, *_COMPARISONS, *_PLACES, *_UNARY),
        "contains",
    )
} | {
    "call": _call,
    "getattr": getattr,
    "setattr": setattr,
    "delattr": delattr,
    "instance": lambda kind, value: isinstance(value, kind),
    "subclass": lambda kind, value: issubclass(value, kind),
    "enter": lambda value: value.__enter__(),
    "exit": lambda value, *error: value.__exit__(*error),
    "divmod": divmod,
    "round": round,
    "len": len,
    "iter": iter,
    "next": next,
    "reversed": reversed,
    "hash": hash,
    "str": str,
    "repr": repr,
    "format": format,
    "bool": bool,
    "int": int,
    "float": float,
    "complex": complex,
    "bytes": bytes,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}


class Far:
    """An object in the other process."""

    __slots__ = ("__weakref__", "_far_handle", "_far_operators", "_far_peer", "_far_shape")

    def __init__(self, peer: Any, handle: int, shape: dict[str, Any]) -> None:
        put = object.__setattr__
        put(self, "_far_peer", peer)
        put(self, "_far_handle", handle)
        put(self, "_far_shape", shape)
        put(self, "_far_operators", peer.operators(shape))

    def __del__(self) -> None:
        self._far_peer.dropped.append(self._far_handle)

    def _far_ask(self, do: str, *arguments: Any) -> Any:
        return self._far_peer.ask(do, self, *arguments)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # isinstance looks at it
        kind = KINDS.get(self._far_shape["type"])
        return kind or self._far_ask("getattr", "__class__")

    def __getattr__(self, name: str) -> Any:
        return self._far_ask("getattr", name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._far_ask("setattr", name, value)

    def __delattr__(self, name: str) -> None:
        self._far_ask("delattr", name)

    def __hash__(self) -> int:
        return int(self._far_ask("hash")) if self._far_operators else self._far_handle

    def __contains__(self, value: Any) -> bool:
        if self._far_operators:
            return bool(self._far_ask("contains", value))
        return any(each is value or each == value for each in self)

    def __iter__(self) -> Any:
        return self._far_ask("iter")

    def __next__(self) -> Any:
        return self._far_ask("next")

    def __enter__(self) -> Any:
        return self._far_ask("enter")

    def __exit__(self, kind: Any, error: Any, trace: Any) -> Any:
        return self._far_ask("exit", kind, error, None)

    def __round__(self, *digits: int) -> Any:
        return self._far_ask("round", *digits)

    def __deepcopy__(self, memo: Any) -> Any:
        return self._far_ask("deepcopy")


def _single(do: str) -> Callable[..., Any]:
    return lambda self, *arguments: self._far_ask(do, *arguments)


def _binary(do: str, *, swapped: bool) -> Callable[..., Any]:
    def operate(self: Far, other: Any) -> Any:
        if not self._far_operators:
            return NotImplemented
        pair = (other, self) if swapped else (self, other)
        return self._far_peer.ask(do, *pair)

    return operate


def _compare(do: str) -> Callable[..., Any]:
    """Compares; the other process is believed only of two objects of a class that may say it."""

    def compare(self: Far, other: Any) -> Any:
        peer = self._far_peer
        both = is_far(other) and other._far_operators and self._far_operators
        if both or peer.believes:
            return peer.ask(do, self, other)
        mine, others = plain(self), plain(other)
        if mine is self or others is not other:
            return NotImplemented
        return OPERATIONS[do](mine, others)

    return compare


for _stem in (*_BINARY, "divmod"):
    setattr(Far, f"__{_stem}__", _binary(_stem, swapped=False))
    setattr(Far, f"__r{_stem}__", _binary(_stem, swapped=True))
for _stem in _PLACES:
    setattr(Far, f"__{_stem}__", _binary(_stem, swapped=False))
for _stem in _COMPARISONS:
    setattr(Far, f"__{_stem}__", _compare(_stem))
for _stem in (
    *(*_UNARY, "len", "str", "repr", "format", "bool", "int", "float", "complex", "bytes"),
    *("reversed", "copy"),
):
    setattr(Far, f"__{_stem}__", _single(_stem))


class FarCallable(Far):
    """A function, class or callable object in the other process."""

    __slots__ = ()

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._far_ask("call", arguments, tuple(named.items()))

    def __instancecheck__(self, value: Any) -> bool:
        return bool(self._far_ask("instance", value))

    def __subclasscheck__(self, value: Any) -> bool:
        return bool(self._far_ask("subclass", value))


for _kind in (Far, FarCallable):  # each has a text of its own, which is not the object's
    setattr(_kind, "__doc__", property(lambda self: self._far_ask("getattr", "__doc__")))  # noqa: B010


def is_far(value: Any) -> bool:
    """Whether it is one; isinstance would ask what it says that it is."""
    return Far in type(value).__mro__


def plain(value: Any) -> Any:
    """The content of a Far whose class is derived from a builtin one; else the value."""
    if is_far(value) and value._far_shape["content"]:
        return value._far_peer.ask("content", value)
    return value
