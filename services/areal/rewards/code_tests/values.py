"""Values as JSON: plain ones are copied, and all else is left to a Peer (wire.py).

A bare interpreter runs this file inside a box; it imports nothing but the standard library and the
other files of this folder.
"""

import importlib
import sys
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from typing import Any

from areal.rewards.code_tests.far import is_far

LARGE = 1 << 63
CONTAINERS: dict[str, type] = {
    kind.__name__: kind
    for kind in (list, dict, set, bytearray, deque, OrderedDict, defaultdict, Counter)
}
_NUMERIC = "biufc"
_FLAT = (str, float, bool, int)
# Classes whose instances are copied as text, and what reads it; empty: the class.
_TEXTS = {
    ("decimal", "Decimal"): "",
    ("fractions", "Fraction"): "",
    ("uuid", "UUID"): "",
    ("pathlib", "PosixPath"): "",
    ("datetime", "datetime"): "fromisoformat",
    ("datetime", "date"): "fromisoformat",
    ("datetime", "time"): "fromisoformat",
}
_PACKED: dict[type, Callable[["Table", Any], Any]] = {
    int: lambda _, value: value if -LARGE < value < LARGE else ["int", hex(value)],
    tuple: lambda table, value: ["tuple", [table.pack(each) for each in value]],
    frozenset: lambda table, value: ["frozenset", [table.pack(each) for each in value]],
    complex: lambda _, value: ["complex", value.real, value.imag],
    bytes: lambda _, value: ["bytes", value.decode("latin-1")],
    range: lambda table, value: ["range", *map(table.pack, (value.start, value.stop, value.step))],
    slice: lambda table, value: ["slice", *map(table.pack, (value.start, value.stop, value.step))],
    type(...): lambda _, value: ["constant", "Ellipsis"],
    type(NotImplemented): lambda _, value: ["constant", "NotImplemented"],
    type({}.keys()): lambda table, value: ["keys", [[table.pack(each), None] for each in value]],
    type({}.items()): lambda table, value: [
        "items",
        [[table.pack(key), table.pack(each)] for key, each in value],
    ],
}
_UNPACKED: dict[str, Callable[..., Any]] = {
    "ref": lambda table, number: table.objects[number],
    "int": lambda _, text: int(text, 16),
    "tuple": lambda table, items: tuple(map(table.unpack, items)),
    "frozenset": lambda table, items: frozenset(map(table.unpack, items)),
    "complex": lambda _, real, imaginary: complex(real, imaginary),
    "bytes": lambda _, text: text.encode("latin-1"),
    "range": lambda table, *parts: range(*map(table.unpack, parts)),
    "slice": lambda table, *parts: slice(*map(table.unpack, parts)),
    "constant": lambda _, name: {"Ellipsis": ..., "NotImplemented": NotImplemented}[name],
    "keys": lambda table, pairs: {table.unpack(key): None for key, _ in pairs}.keys(),
    "items": lambda table, pairs: {table.unpack(a): table.unpack(b) for a, b in pairs}.items(),
    "timedelta": lambda _, *parts: importlib.import_module("datetime").timedelta(*parts),
    "text": lambda _, module, name, text: _read(module, name, text),
    "namedtuple": lambda table, name, fields, values: namedtuple(name, fields)(
        *map(table.unpack, values)
    ),
    "numpy": lambda _, kind, shape, data: _array(kind, shape, data),
}


class Table:
    """The values of one call. Both sides number its mutable ones alike."""

    def __init__(self, peer: Any) -> None:
        """Takes the Peer that packs and unpacks what is not plain."""
        self.objects: list[Any] = []
        self._peer = peer
        self._numbers: dict[int, int] = {}

    def pack(self, value: Any) -> Any:  # noqa: PLR0911  (one for each kind)
        """Returns a value as JSON."""
        kind = type(value)
        if value is None or kind in (bool, float, str):
            return value
        if kind in _PACKED:
            return _PACKED[kind](self, value)
        if CONTAINERS.get(kind.__name__) is kind:
            return ["ref", self._number(value)]
        named = kind.__module__, kind.__qualname__
        if named in _TEXTS:
            return ["text", *named, value.isoformat() if _TEXTS[named] else str(value)]
        if named == ("datetime", "timedelta"):
            return ["timedelta", value.days, value.seconds, value.microseconds]
        if is_far(value):
            return ["near", value._far_handle]
        if _is_array(value):
            shape = list(value.shape) if kind.__name__ == "ndarray" else None
            return ["numpy", value.dtype.str, shape, value.tobytes().decode("latin-1")]
        return self._peer.pack_other(self, value)

    def pack_namedtuple(self, value: Any) -> list[Any]:
        """Returns a tuple with names as JSON."""
        items = [self.pack(each) for each in tuple.__iter__(value)]
        return ["namedtuple", type(value).__name__, list(value._fields), items]

    def unpack(self, data: Any) -> Any:
        """Returns the value; raises an exception for what no `pack` makes."""
        if data is None or isinstance(data, bool | int | float | str):
            return data
        tag, *rest = data
        if tag in _UNPACKED:
            return _UNPACKED[tag](self, *rest)
        return self._peer.unpack_other(self, tag, rest)

    def content(self, value: Any) -> list[Any]:
        """Returns what is in a mutable value, as JSON; what that refers to is numbered."""
        kind = type(value)
        if kind is list and _is_flat(value):
            return ["flat", value.copy()]
        if kind is bytearray:
            return ["bytearray", value.decode("latin-1")]
        if isinstance(value, dict):
            items = [[self.pack(key), self.pack(each)] for key, each in value.items()]
            factory = value.default_factory if isinstance(value, defaultdict) else None
            return [kind.__name__, items, self.pack(factory)]
        most = value.maxlen if isinstance(value, deque) else None
        return [kind.__name__, [self.pack(each) for each in value], most]

    def rest(self, known: int) -> list[list[Any]]:
        """Returns the contents of the objects from that number on."""
        contents: list[list[Any]] = []
        while known + len(contents) < len(self.objects):
            contents.append(self.content(self.objects[known + len(contents)]))
        return contents

    def add(self, contents: list[list[Any]]) -> None:
        """Makes the objects that the other side has numbered next."""
        known = len(self.objects)
        for kind, _, *extra in contents:
            shell: Any = [] if kind == "flat" else CONTAINERS[kind]()
            if kind == "deque":
                shell = deque(maxlen=extra[0])
            self._number(shell)
        for number, content in enumerate(contents, known):
            self.fill(number, content)

    def fill(self, number: int, content: list[Any]) -> None:
        """Gives an object the content that the other side says."""
        value, (kind, items, *extra) = self.objects[number], content
        value.clear()
        if kind == "flat":
            value.extend(items)
        elif kind == "bytearray":
            value.extend(items.encode("latin-1"))
        elif isinstance(value, dict):
            for key, each in items:
                value[self.unpack(key)] = self.unpack(each)
            if isinstance(value, defaultdict):
                value.default_factory = self.unpack(extra[0])
        elif isinstance(value, set):
            value.update(map(self.unpack, items))
        else:
            value.extend(map(self.unpack, items))

    def _number(self, value: Any) -> int:
        number = self._numbers.setdefault(id(value), len(self.objects))
        if number == len(self.objects):
            self.objects.append(value)
        return number


def is_namedtuple(value: Any) -> bool:
    """Whether it is a tuple with names."""
    return isinstance(value, tuple) and type(getattr(value, "_fields", None)) is tuple


def _is_flat(value: list[Any]) -> bool:
    """Whether JSON has a list as it is."""
    kinds = set(map(type, value))
    if len(kinds) != 1 or (kind := kinds.pop()) not in _FLAT:
        return False
    return kind is not int or (min(value) > -LARGE and max(value) < LARGE)


def _is_array(value: Any) -> bool:
    kind = type(value)
    numbers = getattr(getattr(value, "dtype", None), "kind", "?") in tuple(_NUMERIC)
    return kind.__module__ == "numpy" and numbers and kind.__name__ != "matrix"


def _array(kind: str, shape: list[int] | None, data: str) -> Any:
    numpy = importlib.import_module("numpy")
    if numpy.dtype(kind).kind not in _NUMERIC:
        raise ValueError(f"an array of {kind!r}")
    found = numpy.frombuffer(data.encode("latin-1"), dtype=numpy.dtype(kind))
    return found[0] if shape is None else found.reshape(shape).copy()


def _read(module: str, name: str, text: str) -> Any:
    reader = _TEXTS[module, name]
    kind = getattr(importlib.import_module(module), name)
    return (getattr(kind, reader) if reader else kind)(text)


def standard(module: str, name: str) -> Any:
    """Returns an object of the standard library by its qualified name; raises if there is none."""
    if module.partition(".")[0] not in sys.stdlib_module_names:
        raise ValueError(f"{module!r} is not of the standard library")
    found: Any = importlib.import_module(module)
    for part in filter(None, name.split(".")):
        found = getattr(found, part)
    return found
