"""Calls between the process that runs tests and the process that runs the code under test.

Plain values (numbers, text, lists, dicts, …) are copied. A list that the other side changes is
changed here, too, when the call returns. Everything else stays in its process, and the other side
holds a `Far`: calls, attributes and operators of it are messages. A message is JSON after four
bytes of length; unlike pickle, it cannot run code in the process that reads it.

    request   do, args, objects (mutable values of args, by number), dropped (handles)
    reply     value or error, objects (further ones), changed (number and content), printed

A bare interpreter runs this file inside a box; it imports nothing but the standard library and the
other files of this folder.

| waits for            | unblocked by                                          |
|----------------------|-------------------------------------------------------|
| a reply or a request | the other process, or its end; the box's limit of time |
"""

import json
import os
import threading
import weakref
from typing import Any, NoReturn

from areal.rewards.code_tests.far import Far, FarCallable
from areal.rewards.code_tests.values import Table

ERRORS = (
    *("json.decoder", "decimal", "re", "sre_constants", "statistics", "struct", "queue"),
    *("binascii", "configparser", "dataclasses", "copy", "asyncio.exceptions"),
)
"""Modules whose exceptions are the same class on both sides; builtins' are, too."""


class Peer:
    """One end. A subclass says what it does, and what of its objects the other side gets."""

    believes = False
    """Whether the other side's comparisons are believed."""

    def __init__(self, reader: int, writer: int) -> None:
        """Takes the descriptors of two pipes."""
        self._reader, self._writer = reader, writer
        self._lock = threading.RLock()
        self._homes: dict[int, Any] = {}  # handle to what the other side knows of
        self._handles: dict[int, int] = {}  # its id to the handle
        self._given = 0
        self._fars: weakref.WeakValueDictionary[int, Far] = weakref.WeakValueDictionary()
        self._error_classes: dict[int, type] = {}
        self.dropped: list[int] = []

    # -- what a subclass says ---------------------------------------------------------------------

    def serve(self, do: str, arguments: list[Any]) -> Any:
        """Does what the other side asks."""
        raise NotImplementedError

    def pack_other(self, table: Table, value: Any) -> Any:
        """Packs a value that is not plain."""
        raise NotImplementedError

    def operators(self, shape: dict[str, Any]) -> bool:
        """Whether operators with one of the other side's objects are that side's to answer."""
        raise NotImplementedError

    def resolve(self, module: str, name: str) -> Any:
        """Returns the object of the standard library that the other side names."""
        raise NotImplementedError

    def printed(self) -> str:
        """Returns what was printed here since the last reply."""
        return ""

    def hear(self, text: str) -> None:
        """Takes what the other side printed."""

    def broken(self, why: str) -> NoReturn:
        """The other side has ended or sends nonsense."""
        raise NotImplementedError

    # -- calls ------------------------------------------------------------------------------------

    def ask(self, do: str, *arguments: Any) -> Any:
        """Has the other side do something; returns or raises what that returns or raises."""
        with self._lock:
            table = Table(self)
            packed = [table.pack(each) for each in arguments]
            dropped, self.dropped = self.dropped, []
            self._send({"do": do, "args": packed, "objects": table.rest(0), "dropped": dropped})
            while "do" in (message := self._receive()):
                self._answer(message)
            try:
                table.add(message["objects"])
                for number, content in message["changed"]:
                    table.fill(number, content)
                printed, failed = str(message["printed"]), "error" in message
                result = table.unpack(message["error" if failed else "value"])
                if failed and not isinstance(result, BaseException):
                    raise ValueError("not an exception")
            except Exception as error:
                self.broken(f"a reply that cannot be read: {error!r}")
        self.hear(printed)
        if failed and do != "next" and isinstance(result, StopIteration | StopAsyncIteration):
            # It would end a loop of the tests (`map`, `async for`) as if there were no more to do.
            raise RuntimeError(f"{do}: raised {type(result).__name__}") from result
        if failed:
            raise result
        return result

    def answer_all(self) -> None:
        """Does what the other side asks until it ends."""
        while True:
            self._answer(self._receive())

    def _answer(self, message: dict[str, Any]) -> None:
        table = Table(self)
        try:
            for handle in message["dropped"]:
                self._handles.pop(id(self._homes.pop(handle, None)), None)
            table.add(message["objects"])
            known = len(table.objects)
            do, arguments = message["do"], [table.unpack(each) for each in message["args"]]
        except Exception as error:
            self.broken(f"a request that cannot be read: {error!r}")
        reply: dict[str, Any]
        try:
            reply = {"value": table.pack(self.serve(do, arguments))}
        except BaseException as error:
            reply = {"error": self.pack_error(table, error)}
        changed = []
        for number in range(known):
            content = table.content(table.objects[number])
            if json.dumps(content) != json.dumps(message["objects"][number]):
                changed.append([number, content])
        self._send(
            {**reply, "changed": changed, "objects": table.rest(known), "printed": self.printed()}
        )

    def _send(self, message: dict[str, Any]) -> None:
        body = json.dumps(message).encode()
        rest = memoryview(len(body).to_bytes(4, "big") + body)
        try:
            while rest:
                rest = rest[os.write(self._writer, rest) :]
        except OSError as error:
            self.broken(repr(error))

    def _receive(self) -> dict[str, Any]:
        try:
            size = int.from_bytes(self._exactly(4), "big")
            message = json.loads(self._exactly(size))
            if type(message) is not dict:
                raise ValueError("not a message")
        except Exception as error:
            self.broken(repr(error))
        return message

    def _exactly(self, size: int) -> bytes:
        parts = []
        while size:
            part = os.read(self._reader, min(size, 1 << 20))
            if not part:
                self.broken("it ended early")
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    # -- objects that stay ------------------------------------------------------------------------

    def export(self, value: Any) -> int:
        """Returns the number by which the other side knows an object of this one."""
        handle = self._handles.get(id(value))
        if handle is None:
            self._given += 1
            handle = self._handles[id(value)] = self._given
            self._homes[handle] = value
        return handle

    def exported(self, value: Any) -> bool:
        """Whether the other side may ask about that object."""
        return id(value) in self._handles

    def far(self, handle: int, shape: dict[str, Any]) -> Far:
        """Returns the Far of the other side's object, always the same."""
        found = self._fars.get(handle)
        if found is None:
            found = (FarCallable if shape["call"] else Far)(self, handle, shape)
            self._fars[handle] = found
        return found

    def pack_far(self, value: Any, content: bool = False) -> list[Any]:
        """An object that stays here."""
        kind = value if isinstance(value, type) else type(value)
        shape = {
            "type": type(value).__name__,
            "classes": [each.__name__ for each in kind.__mro__],
            "call": callable(value),
            "content": content,
        }
        return ["far", self.export(value), shape]

    def unpack_other(self, table: Table, tag: str, data: list[Any]) -> Any:
        """Decodes what stays in a process, is the same in both, or is an exception."""
        if tag == "far":
            return self.far(*data)
        if tag == "near":
            return self._homes[data[0]]
        if tag == "global":
            return self.resolve(*data)
        if tag == "coroutine":
            return _awaited(self.far(*data))
        if tag == "error class":
            return self._error_class(table, *data)
        if tag == "error":
            return self._error(table, *data)
        raise ValueError(f"tag {tag!r}")

    def pack_error_class(self, kind: type) -> list[Any]:
        """A class of exceptions; the other side makes one like it if it does not have it."""
        if "_far_class" in kind.__dict__:
            return ["near", kind.__dict__["_far_class"]]
        if kind.__module__ in ("builtins", *ERRORS):
            return ["global", kind.__module__, kind.__name__]
        bases = [base for base in kind.__bases__ if issubclass(base, BaseException)]
        return [
            *("error class", self.export(kind), kind.__name__),
            [self.pack_error_class(base) for base in bases],
        ]

    def pack_error(self, table: Table, error: BaseException) -> list[Any]:
        """An exception: its class, arguments, text and attributes."""
        known = error.__dict__.get("_far_handle")
        if known is not None:
            return ["near", known]
        try:
            kind = self.pack_error_class(type(error))
            attributes = [[name, table.pack(value)] for name, value in vars(error).items()]
            arguments = [table.pack(each) for each in error.args]
            return ["error", self.export(error), kind, arguments, str(error), attributes]
        except Exception as other:
            text = f"{type(error).__name__} (and {type(other).__name__} when it was passed on)"
            return ["error", 0, ["global", "builtins", "Exception"], [text], text, []]

    def _error_class(self, table: Table, handle: int, name: str, bases: list[Any]) -> type:
        made = self._error_classes.get(handle)
        if made is None:
            members = {"_far_class": handle, "__str__": _error_text}
            parents = tuple(table.unpack(base) for base in bases)
            if not all(issubclass(parent, BaseException) for parent in parents):
                raise ValueError("an exception that is none")
            made = self._error_classes[handle] = type(str(name), parents, members)
        return made

    def _error(
        self, table: Table, handle: int, kind: Any, arguments: Any, text: str, attributes: Any
    ) -> BaseException:
        made, values = table.unpack(kind), [table.unpack(each) for each in arguments]
        if not issubclass(made, BaseException):
            raise ValueError("an exception that is none")
        try:
            error: BaseException = made(*values)
        except Exception:
            error = made.__new__(made)
            error.args = tuple(values)
        for name, value in attributes:
            if not str(name).startswith("_"):
                error.__dict__[str(name)] = table.unpack(value)
        error.__dict__.update(_far_handle=handle or None, _far_text=str(text))
        return error


def _error_text(error: BaseException) -> str:
    said = error.__dict__.get("_far_text")
    return BaseException.__str__(error) if said is None else str(said)


def _awaited(far: Far) -> Any:
    """A coroutine here that runs one of the other process to its end."""

    async def wait() -> Any:
        return far._far_peer.ask("await", far)

    return wait()
