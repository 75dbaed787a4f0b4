"""The process of the tests: runs them, and says by a word that they ran to their end.

The word, the tests and what they expect are only in this process. It has forked the process of the
code under test before it reads them, and no other process can read its memory or its descriptors.
Code under test therefore only answers calls (wire.py); what is compared is compared here.
"""

import ast
import builtins
import ctypes
import importlib
import io
import json
import linecache
import os
import signal
import sys
import threading
import traceback
import types
from contextlib import suppress
from typing import Any, NoReturn

from areal.rewards.code_tests.far import KINDS, OPERATIONS
from areal.rewards.code_tests.solution import serve
from areal.rewards.code_tests.values import Table, is_namedtuple, standard
from areal.rewards.code_tests.wire import ERRORS, Peer

PR_SET_DUMPABLE = 4
MOST_FILES = 256
FILE = "tests.py"
ALIASES = {"np": "numpy", "pd": "pandas"}
# What shows more of this process than the tests pass on.
_HIDDEN = (types.FrameType, types.TracebackType, types.CodeType, types.ModuleType, BaseException)
_STREAMS = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)


class SolutionExit(SystemExit):
    """The code under test raised SystemExit, which ends no tests well."""


class Tests(Peer):
    """Raised at the end of the tests."""

    def __init__(self, reader: int, writer: int, solution: int) -> None:
        super().__init__(reader, writer)
        self._solution = solution
        self._classes: set[str] = set()

    def load(self, code: str, tree: ast.Module, text: str) -> dict[str, Any]:
        """Runs the code under test; returns what the tests use of its names."""
        offered = {str(name): bool(is_class) for name, is_class in self.ask("load", code)}
        wanted, local = names(tree, text, set(offered))
        self._classes = {name for name in wanted if offered[name] and is_class_name(name)}
        self.ask("classes", list(self._classes))
        return {name: self.ask("get", name) for name in wanted} | local

    def serve(self, do: str, arguments: list[Any]) -> Any:
        """Calls what the tests have passed to the code, or looks at it."""
        target = arguments[0] if arguments else None
        if not self.exported(target) or isinstance(target, _HIDDEN):
            raise TypeError(f"{do}: expected an object of the tests")
        if isinstance(target, _STREAMS):
            allowed: tuple[str, ...] = ("iter", "next")
        elif do in ("getattr", "setattr", "delattr") and str(arguments[1]).startswith("_"):
            raise AttributeError(f"{arguments[1]!r}: an attribute of the tests' own")
        elif type(target).__module__ == "__main__" and not isinstance(target, type):
            allowed = tuple(OPERATIONS)
        elif callable(target):
            allowed = ("call", "getattr", "instance", "subclass")
        else:
            allowed = tuple({*OPERATIONS} - {"setattr", "delattr"})
        if do not in allowed:
            raise TypeError(f"{do}: not of {type(target).__name__!r} of the tests")
        return OPERATIONS[do](*arguments)

    def pack_other(self, table: Table, value: Any) -> Any:
        """Encodes what the tests pass on: the standard library by name, their own as it is."""
        if isinstance(value, BaseException):
            return self.pack_error(table, value)
        if isinstance(value, type) and issubclass(value, BaseException):
            return self.pack_error_class(value)
        if is_namedtuple(value):
            return table.pack_namedtuple(value)
        if isinstance(value, types.ModuleType):
            standard(value.__name__, "")
            return ["global", value.__name__, ""]
        module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
        if isinstance(owner := getattr(value, "__objclass__", None), type):
            module = owner.__module__
        with suppress(Exception):
            if standard(module or "builtins", name or "?") is value:
                return ["global", module or "builtins", name]
        if isinstance(value, _HIDDEN):
            raise TypeError(f"{type(value).__name__!r} cannot be passed to the code under test")
        return self.pack_far(value)

    def operators(self, shape: dict[str, Any]) -> bool:
        """Whether classes have operators of their own: those that the tests use by name have."""
        return bool(self._classes.intersection(map(str, shape["classes"])))

    def resolve(self, module: str, name: str) -> Any:
        """A plain type or an exception; no function, which the code might choose to its liking."""
        if module == "builtins" and name == "SystemExit":
            return SolutionExit
        if module == "builtins" and name in KINDS:
            return KINDS[name]
        found = standard(module, name) if module in ("builtins", *ERRORS) else None
        if not isinstance(found, type) or not issubclass(found, BaseException):
            raise ValueError(f"{module}.{name}")
        return found

    def hear(self, text: str) -> None:
        """Prints what the code printed, where the tests print now."""
        if text:
            sys.stdout.write(text)

    def broken(self, why: str) -> NoReturn:
        """Ends the tests without a word: no test can take it for the exception that it expects."""
        with suppress(ChildProcessError):
            pid, status = os.waitpid(self._solution, os.WNOHANG)
            why += f"; exit status {os.waitstatus_to_exitcode(status)}" if pid else ""
        print(f"the code under test ended or does not answer: {why}", file=sys.__stderr__)
        os._exit(1)


def is_class_name(name: str) -> bool:
    """Whether people write classes so, and not functions."""
    return name.lstrip("_")[:1].isupper()


def names(tree: ast.Module, text: str, offered: set[str]) -> tuple[set[str], dict[str, Any]]:
    """Returns which names the tests want of the code, and the modules that they mean.

    A name of Python is Python's, unless the code offers no other that the tests use: then it is
    what they test. A module of the standard library is the module, whatever the code calls so.
    """
    used: set[str] = set()
    bound: set[str] = set()
    bare: set[str] = set()
    dotted: dict[str, set[str]] = {}
    parents = {id(node.value): node for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else bound).add(node.id)
            if id(node) in parents:
                dotted.setdefault(node.id, set()).add(parents[id(node)].attr)
            else:
                bare.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).partition(".")[0])
    local = {}
    for name in dotted.keys() - bare - bound:
        if name in ALIASES or name in sys.stdlib_module_names:
            with suppress(ImportError):
                module = importlib.import_module(ALIASES.get(name, name))
                if all(hasattr(module, each) for each in dotted[name]):
                    local[name] = module
    python = set(dir(builtins))
    free = (used - bound - set(local)) & offered
    tested = free - python or free
    mentioned = {each for each in offered if each.isidentifier() and each in text}
    wanted = tested | (mentioned - python - set(local))
    return {name for name in wanted if not name.startswith("__")}, local


def uncalled(tree: ast.Module, space: dict[str, Any]) -> None:
    """Runs tests that their text defines and leaves to a test runner (pytest, unittest)."""
    called = {
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        value = space.get(node.name)
        if node.name in called or not callable(value):
            continue
        if isinstance(node, ast.ClassDef):
            run_class(value)
        elif node.name.startswith("test"):
            run_function(value)


def run_class(made: Any) -> None:
    """Runs the tests of a class: of unittest, or one that pytest would find."""
    unittest = sys.modules.get("unittest")
    if unittest and isinstance(made, type) and issubclass(made, unittest.TestCase):
        suite = unittest.defaultTestLoader.loadTestsFromTestCase(made)
        if not unittest.TextTestRunner(stream=sys.stderr).run(suite).wasSuccessful():
            raise AssertionError(f"{made.__name__} failed")
    elif made.__name__.startswith("Test"):
        for name in [each for each in vars(made) if each.startswith("test")]:
            each = made()
            getattr(each, "setup_method", lambda: None)()
            run_function(getattr(each, name))


def run_function(function: Any) -> None:
    """Runs a test; one that needs arguments, such as pytest's fixtures, is a failure."""
    result = function()
    if isinstance(result, types.CoroutineType):
        importlib.import_module("asyncio").run(result)


def run(peer: Tests, code: str, tests: str) -> None:
    """Runs the code, then the tests; raises what either raises."""
    module = types.ModuleType("__main__")
    space = module.__dict__
    sys.modules["__main__"], sys.argv = module, [FILE]
    linecache.cache[FILE] = (len(tests), None, tests.splitlines(keepends=True), FILE)
    tree = ast.parse(tests, FILE)
    space.update(peer.load(code, tree, tests))
    exec(compile(tests, FILE, "exec", dont_inherit=True), space)  # noqa: S102  (in a box)
    uncalled(tree, space)  # unittest.main() would have ended the process


def start_solution() -> tuple[int, int, int, int]:
    """Forks the process of the code: where it answers, is asked, and reads input, and its pid."""
    (read_input, write_input), (read_asked, ask), (answers, answer) = (os.pipe() for _ in range(3))
    pid = os.fork()
    if pid == 0:
        nothing = os.open("/dev/null", os.O_RDWR)
        for fd, stream in ((0, read_input), (1, nothing), (2, nothing)):
            os.dup2(stream, fd)
        for fd in {*range(3, MOST_FILES)} - {read_asked, answer}:
            with suppress(OSError):
                os.close(fd)
        serve(read_asked, answer)
    for fd in (read_input, read_asked, answer):
        os.close(fd)
    return answers, ask, write_input, pid


def feed(fd: int, data: bytes) -> None:
    """Gives the code its input, as fast as it reads it."""
    with suppress(OSError), open(fd, "wb") as file:
        file.write(data)


def main() -> NoReturn:
    """Runs what standard input says; prints its word if the tests ran to their end."""
    for name in [each for each in sys.modules if each.startswith("areal.")]:
        del sys.modules[name]  # not the tests' to import
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0)
    _streams = sys.stdin, sys.stdout, sys.stderr  # they would close their descriptors if collected
    answers, ask, write_input, pid = start_solution()
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    request = json.loads(sys.stdin.buffer.read())
    verdict, nothing = os.dup(1), os.open("/dev/null", os.O_WRONLY)
    os.dup2(nothing, 1)
    sys.stdin, sys.stdout = (
        io.StringIO(),
        io.TextIOWrapper(Log(request["room"]), encoding="utf-8", write_through=True),
    )
    sys.stderr = sys.__stderr__ = sys.stdout  # type: ignore[misc]
    data = request["stdin"].encode(errors="replace")
    threading.Thread(target=feed, args=(write_input, data), daemon=True).start()
    passed = False
    try:
        run(Tests(answers, ask, pid), request["code"], request["tests"])
        passed = True
    except SystemExit as end:  # as unittest.main does
        passed = type(end) is SystemExit and not end.code
    except BaseException:
        traceback.print_exc()
    if passed:
        os.write(verdict, request["word"].encode())
    os.kill(pid, signal.SIGKILL)
    os._exit(0)


class Log(io.RawIOBase):
    """Standard error of this process, up to a size."""

    def __init__(self, room: int) -> None:
        self._room = room

    def writable(self) -> bool:
        """Returns True, as a file that is open for writing does."""
        return True

    def write(self, data: Any) -> int:
        """Takes all; the end of much is dropped."""
        part = bytes(data)[: max(0, self._room)]
        self._room -= len(part)
        if part:
            os.write(2, part)
        return len(data)
