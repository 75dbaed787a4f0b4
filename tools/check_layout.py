"""Every service is laid out alike, files stay short, tests mirror the source.

A service `areal_x` has the rooms below; its classes are `XService` (servicer.py: convert, call the
core, convert), `XServer` (server.py: wiring) and `XConfig.from_experiment` (config.py); its
`__main__` calls `main` of server.py; its Lua lies in lua/; the docstring of its `__init__` names
the core, which imports no transport and says what it waits for.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# The command starts services; it is none.
NOT_SERVICES = ("areal_launch", "areal_torch")
ROOMS = (
    "__init__.py",
    "__main__.py",
    "config.py",
    "metrics.py",
    "server.py",
    "servicer.py",
    "README.md",
)
# What a service lacks on purpose, and why.
EXCEPTIONS = {
    ("areal_gateway", "servicer.py"): "speaks HTTP alone: app.py and rest.py convert",
    ("areal_inference", "servicer.py"): "speaks SGLang's HTTP alone: http_api/ converts",
    (
        "areal_inference",
        "from_experiment",
    ): "takes flags as SGLang does: both start alike",
}
MAIN = '''"""`areal-{command}`, and `python -m {package}`."""

from areal.chassis.collector import collector_paused

with collector_paused():
    from {package}.server import main

if __name__ == "__main__":
    main()
'''
# One idea a file: around 400 lines, and never more than this.
MAX_LINES = 600
# A core is a state machine: what it talks to comes in from outside.
TRANSPORTS = {"aiohttp", "fastapi", "grpc", "kubernetes", "nats", "redis", "starlette", "uvicorn"}


class Service:
    """The folder of one service."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.package = folder.name
        short = self.package.removeprefix("areal_")
        self.command = short.replace("_", "-")
        self.name = "".join(part.capitalize() for part in short.split("_"))

    def may_lack(self, what: str) -> bool:
        return (self.package, what) in EXCEPTIONS

    def problems(self) -> list[str]:
        """What is wrong with it, a line each."""
        missing = [
            f"{room} is missing"
            for room in ROOMS
            if not (self.folder / room).is_file() and not self.may_lack(room)
        ]
        found = missing or [
            *self._main(),
            *self._server(),
            *self._config(),
            *self._servicer(),
            *self._lua(),
            *self._core(),
        ]
        return [f"services/{self.package}: {problem}" for problem in found]

    def _tree(self, file: str) -> ast.Module:
        return ast.parse((self.folder / file).read_text())

    def _class(self, file: str, name: str) -> ast.ClassDef | None:
        tree = self._tree(file)
        found = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
        return next(found, None)

    def _main(self) -> list[str]:
        expected = MAIN.format(command=self.command, package=self.package)
        same = (self.folder / "__main__.py").read_text() == expected
        return [] if same else [f"__main__.py: expected\n{expected}"]

    def _server(self) -> list[str]:
        problems = []
        if self._class("server.py", f"{self.name}Server") is None:
            problems.append(f"server.py: expected a class {self.name}Server")
        functions = [n.name for n in self._tree("server.py").body if isinstance(n, ast.FunctionDef)]
        if "main" not in functions:
            problems.append("server.py: expected a function main")
        return problems

    def _config(self) -> list[str]:
        name, problems = f"{self.name}Config", []
        classes = [n.name for n in self._tree("config.py").body if isinstance(n, ast.ClassDef)]
        if classes != [name]:
            problems.append(f"config.py: classes {classes}, expected {name} alone")
        found = self._class("config.py", name)
        methods = {n.name for n in found.body if isinstance(n, ast.FunctionDef)} if found else set()
        if found and "from_experiment" not in methods and not self.may_lack("from_experiment"):
            problems.append(f"config.py: expected {name}.from_experiment")
        return problems

    def _servicer(self) -> list[str]:
        if not (self.folder / "servicer.py").is_file():
            return []
        name = f"{self.name}Service"
        found = self._class("servicer.py", name)
        if found is None:
            return [f"servicer.py: expected a class {name}"]
        bases = [ast.unparse(base).rpartition(".")[2] for base in found.bases]
        return [] if bases == [f"{name}Servicer"] else [f"servicer.py: {name} is no {name}Servicer"]

    def _lua(self) -> list[str]:
        strays = [
            str(file.relative_to(self.folder))
            for file in sorted(self.folder.rglob("*.lua"))
            if file.parent != self.folder / "lua"
        ]
        problems = [f"{file}: Lua lies in lua/" for file in strays]
        writes = any("register_script(" in f.read_text() for f in self.folder.rglob("*.py"))
        if writes and not (self.folder / "lua").is_dir():
            problems.append("it changes Redis, and has no lua/")
        return problems

    def _core(self) -> list[str]:
        said = ast.get_docstring(self._tree("__init__.py")) or ""
        named = [line for line in said.splitlines() if line.startswith("Core: `")]
        if len(named) != 1:
            return ["__init__.py: expected a line: Core: `FILE.py`"]
        name = named[0].split("`")[1]
        # The trainer's core is what its engines share, in the library.
        file = self.folder.parent / name if "/" in name else self.folder / name
        if not file.is_file():
            file = self.folder / name
        if not file.is_file():
            return [f"__init__.py: its core {name} is no file"]
        tree, problems = ast.parse(file.read_text()), []
        imported = {
            alias.name.partition(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, ast.Import)
            for alias in node.names
        } | {
            (node.module or "").partition(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
        }
        if foreign := sorted(imported & TRANSPORTS):
            problems.append(f"{name}: a core imports no {', '.join(foreign)}")
        if "unblocked by" not in (ast.get_docstring(tree) or ""):
            problems.append(f"{name}: expected a table in its docstring: what, waits, unblocked by")
        return problems


def services(root: Path) -> list[Service]:
    """Returns all services except the command."""
    return [
        Service(folder)
        for folder in sorted((root / "services").glob("areal_*"))
        if folder.name not in NOT_SERVICES and (folder / "__init__.py").exists()
    ]


def stale_exceptions(root: Path) -> list[str]:
    """Exceptions that are no longer needed."""
    return [
        f"tools/check_layout.py: {package} has {what}; remove it from EXCEPTIONS"
        for package, what in EXCEPTIONS
        if (root / "services" / package / what).is_file()
    ]


def long_files(root: Path) -> list[str]:
    """Files of services and of tests over the limit."""
    return [
        f"{file.relative_to(root)}: {lines} lines, at most {MAX_LINES}"
        for top in ("services", "tests")
        for file in sorted((root / top).rglob("*.py"))
        if root / "services" / "areal" / "v1" not in file.parents
        and (lines := len(file.read_text().splitlines())) > MAX_LINES
    ]


def stray_tests(root: Path) -> list[str]:
    """Folders of unit tests without a package of that name, and services without unit tests."""
    unit = root / "tests" / "unit"
    strays = [
        f"tests/unit/{folder.relative_to(unit)}: no such package under services/"
        for folder in sorted(p for p in unit.rglob("*") if p.is_dir())
        if any(folder.glob("test_*.py"))
        and not (root / "services" / folder.relative_to(unit)).is_dir()
    ]
    return strays + [
        f"services/{service.package}: no unit tests in tests/unit/{service.package}"
        for service in services(root)
        if not any((unit / service.package).glob("test_*.py"))
    ]


def same_names(root: Path) -> list[str]:
    """Files of tests that pytest would take for one module: tests are no packages."""
    files: dict[str, list[str]] = {}
    for file in sorted((root / "tests").rglob("test_*.py")):
        files.setdefault(file.name, []).append(str(file.relative_to(root)))
    return [
        f"{' and '.join(same)}: pytest expects different names"
        for same in files.values()
        if len(same) > 1
    ]


def check(root: Path) -> list[str]:
    """Everything that is wrong below a root, a line each."""
    return [
        *(problem for service in services(root) for problem in service.problems()),
        *stale_exceptions(root),
        *long_files(root),
        *stray_tests(root),
        *same_names(root),
    ]


def main() -> int:
    """Prints what is wrong; returns the exit code."""
    problems = check(ROOT)
    for problem in problems:
        print(problem)
    if not problems:
        print(f"layout: {len(services(ROOT))} services, all laid out alike")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
