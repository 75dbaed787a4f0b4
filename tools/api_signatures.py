"""Writes tools/api_signatures.json: signatures of what we call, in each supported version.

A GPU machine has a torch and a transformers of its own, and an argument that is missing there shows
only when it is called. So the sources of all supported versions are compared with our calls: each
minor version's wheel is downloaded and parsed, and nothing is installed or imported. (torch's
wheels for macOS are small and hold the same Python sources as those for Linux.)

    python -m tools.api_signatures [FOLDER]     wheels are downloaded into FOLDER, or kept there

`tests/unit/test_api_signatures.py` compares the calls with the file, without a network.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from tools.api_uses import ROOT, Use, uses

FILE = Path(__file__).with_suffix(".json")
FOLDERS = (ROOT / "services",)
VERSIONS = {
    "torch": ("2.11.0", "2.12.1", "2.13.0", "2.14.1"),
    "transformers": ("5.17.0", "5.18.0", "5.19.0", "5.20.2", "5.21.1", "5.22.2", "5.23.0"),
}
"""One release of each minor version that the trainer supports (areal_torch.engines.versions)."""
_PLATFORMS = ("macosx_11_0_arm64", "macosx_14_0_arm64")

Signatures = list[str] | None
"""One signature for each overload; empty: it exists, with an unknown signature; None: it does not
exist."""
Table = dict[str, dict[str, Signatures] | Signatures]
"""Name -> version -> signatures; no versions if all of them have the same."""


@dataclass
class Sources:
    """The parsed sources of one wheel, and of a second for what the first builds on."""

    wheel: zipfile.ZipFile
    below: Sources | None = None
    _modules: dict[str, dict[str, list[ast.AST]] | None] = field(default_factory=dict)
    _members: dict[str, list[Found] | None] = field(default_factory=dict)

    @cached_property
    def _files(self) -> set[str]:
        return set(self.wheel.namelist())

    def signatures(self, name: str) -> Signatures:
        """Returns those of a dotted name or of an operator."""
        if name.startswith("operator "):
            return [] if name.removeprefix("operator ") in self._operators else None
        found = self._find(name.split("."))
        if found is None:
            return self.below.signatures(name) if self.below is not None else None
        return [text for node in found for text in self._signature(node, name)]

    @cached_property
    def _operators(self) -> set[str]:
        yaml = "torchgen/packaged/ATen/native/native_functions.yaml"
        if yaml not in self._files:
            return set()
        native = re.findall(r"^- func: (\w+)", self.wheel.read(yaml).decode(), re.MULTILINE)
        varlen = self.wheel.read("torch/nn/attention/varlen.py").decode()
        custom = re.findall(r'custom_op\(\s*"(torch_attn::\w+)"', varlen)
        return {f"aten::{name}" for name in native} | set(custom)

    # -- finding a name ------------------------------------------------------------------------

    def _find(self, parts: list[str]) -> list[Found] | None:
        """Definitions of a dotted name; an empty list if it is there but cannot be followed."""
        for cut in range(len(parts), 0, -1):
            module = ".".join(parts[:cut])
            if self._module(module) is None:
                continue
            return self._member(module, parts[cut:]) if cut < len(parts) else []
        return None

    def _module(self, name: str) -> dict[str, list[ast.AST]] | None:
        """Definitions at the top of a module by name, `*` for those it takes whole."""
        if name not in self._modules:
            base = name.replace(".", "/")
            paths = [f"{base}{end}" for end in (".py", "/__init__.py", ".pyi", "/__init__.pyi")]
            found: dict[str, list[ast.AST]] | None = None
            for path in paths:
                if path in self._files:
                    tree = ast.parse(self.wheel.read(path).decode())
                    found = _collect(tree.body, found or {})
            self._modules[name] = found
        return self._modules[name]

    def _is_package(self, module: str) -> bool:
        base = module.replace(".", "/")
        return bool({f"{base}/__init__.py", f"{base}/__init__.pyi"} & self._files)

    def _member(self, module: str, rest: list[str]) -> list[Found] | None:
        key = ".".join([module, *rest])
        if key not in self._members:
            self._members[key] = None  # imports may lead back here
            self._members[key] = self._look(module, rest)
        return self._members[key]

    def _look(self, module: str, rest: list[str]) -> list[Found] | None:
        found = self._module(module) or {}
        imports = [n for n in found.get(rest[0], ()) if isinstance(n, ast.ImportFrom | ast.Import)]
        own = [node for node in found.get(rest[0], ()) if node not in imports]
        if own:
            return self._inside(module, own, rest)
        for node in imports:
            target = self._target(module, node, rest[0])
            if self._module(target.partition(".")[0]) is None:
                return []  # of another package
            result = self._find([*target.split("."), *rest[1:]])
            if result is not None:
                return result
        for node in found.get("*", ()) if not imports else ():
            assert isinstance(node, ast.ImportFrom)
            target = self._target(module, node, "")
            result = self._member(target, rest) if self._module(target) is not None else None
            if result is not None:
                return result
        if module == "torch":  # what C++ adds
            for beside in ("torch._C._VariableFunctions", "torch._C"):
                if rest[0] in (self._module(beside) or {}):
                    return self._member(beside, rest)
        return None

    def _inside(self, module: str, nodes: list[ast.AST], rest: list[str]) -> list[Found] | None:
        if len(rest) == 1:
            return [Found(module, node) for node in nodes]
        for node in nodes:
            if not isinstance(node, ast.ClassDef):
                return []  # an attribute of a value
            member = self._of_class(module, node, rest[1])
            if member is not None:
                return member
        return None

    def _of_class(self, module: str, node: ast.ClassDef, name: str) -> list[Found] | None:
        own = _collect(node.body, {})
        if name in own:
            return [Found(module, each, method=True) for each in own[name]]
        for method in node.body:  # what a method sets on the object
            if isinstance(method, ast.FunctionDef) and name in _set_on_self(method):
                return []
        for base in self._bases(module, node):
            if isinstance(base, Found):
                assert isinstance(base.node, ast.ClassDef)
                found = self._of_class(base.module, base.node, name)
                if found is not None:
                    return found
            elif self.below is not None and self.below.signatures(f"{base}.{name}") is not None:
                return []
        return None

    def _bases(self, module: str, node: ast.ClassDef) -> Iterator[Found | str]:
        """Classes that a class builds on; a name where they are in another package."""
        for base in [*node.bases, *(each.value for each in node.keywords)]:
            parts = ast.unparse(base).split("[")[0].split(".")
            found = self._member(module, parts)
            classes = [each for each in found or () if isinstance(each.node, ast.ClassDef)]
            yield from classes
            imported = (self._module(module) or {}).get(parts[0], ())
            for each in imported if not classes else ():
                if isinstance(each, ast.ImportFrom | ast.Import):
                    yield ".".join([self._target(module, each, parts[0]), *parts[1:]])

    def _target(self, module: str, node: ast.ImportFrom | ast.Import, name: str) -> str:
        """Full name of what an import binds to a name."""
        alias = next((a for a in node.names if (a.asname or a.name) == name), None)
        if isinstance(node, ast.Import):
            return alias.name if alias is not None and alias.asname else name
        package = module.split(".")
        if node.level:
            package = package[: len(package) - node.level + self._is_package(module)]
            prefix = ".".join([*package, *([node.module] if node.module else [])])
        else:
            prefix = node.module or ""
        return f"{prefix}.{alias.name}" if alias is not None else prefix

    # -- writing a signature -------------------------------------------------------------------

    def _signature(self, found: Found, name: str) -> Iterator[str]:
        node = found.node
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            static = any("staticmethod" in ast.unparse(each) for each in node.decorator_list)
            yield _written(node.args, skip_first=found.method and not static)
        elif isinstance(node, ast.ClassDef):
            made = [
                init for name in ("__init__", "__new__")
                for init in self._of_class(found.module, node, name) or ()
                if isinstance(init.node, ast.FunctionDef)
            ]  # fmt: skip
            if made:
                yield from (_written(each.node.args, skip_first=True) for each in made)
            elif any("dataclass" in ast.unparse(each) for each in node.decorator_list) or any(
                "NamedTuple" in ast.unparse(each) for each in node.bases
            ):
                yield ", ".join(self._fields(found.module, node))

    def _fields(self, module: str, node: ast.ClassDef) -> Iterator[str]:
        """Arguments of a dataclass or a named tuple."""
        for base in self._bases(module, node):
            if isinstance(base, Found) and isinstance(base.node, ast.ClassDef):
                yield from self._fields(base.module, base.node)
        for each in node.body:
            if not isinstance(each, ast.AnnAssign) or not isinstance(each.target, ast.Name):
                continue
            if "ClassVar" not in ast.unparse(each.annotation):
                yield f"{each.target.id}{'=' if each.value is not None else ''}"


@dataclass(frozen=True)
class Found:
    """A definition, and the module that it is in."""

    module: str
    node: ast.AST
    method: bool = False


def _collect(body: list[ast.stmt], found: dict[str, list[ast.AST]]) -> dict[str, list[ast.AST]]:
    """Definitions by name, also those under `if` and `try`; imports under `*` if they take all."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.setdefault(node.name, []).append(node)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                name = alias.asname or alias.name
                name = name if alias.asname else name.split(".")[0]
                found.setdefault(name, []).append(node)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                for each in ast.walk(target):
                    if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
                        found.setdefault(each.id, []).append(node)
        elif isinstance(node, ast.If | ast.Try | ast.With | ast.For):
            for part in ("body", "orelse", "finalbody"):
                _collect(getattr(node, part, []), found)
            for handler in getattr(node, "handlers", ()):
                _collect(handler.body, found)
    return found


def _set_on_self(method: ast.FunctionDef) -> set[str]:
    return {
        node.attr
        for node in ast.walk(method)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
    }


def _written(args: ast.arguments, *, skip_first: bool) -> str:
    """`query, key, /, *, scale=, **options`: names, and which have a default."""
    plain = [*args.posonlyargs, *args.args]
    first_default = len(plain) - len(args.defaults)
    words = [f"{a.arg}{'=' if n >= first_default else ''}" for n, a in enumerate(plain)]
    if args.posonlyargs:
        words.insert(len(args.posonlyargs), "/")
    words = words[1:] if skip_first else words
    if args.vararg is not None:
        words.append(f"*{args.vararg.arg}")
    elif args.kwonlyargs:
        words.append("*")
    words += [
        f"{a.arg}{'=' if d is not None else ''}"
        for a, d in zip(args.kwonlyargs, args.kw_defaults, strict=True)
    ]
    if args.kwarg is not None:
        words.append(f"**{args.kwarg.arg}")
    return ", ".join(words)


def accepts(signature: str, use: Use) -> str | None:
    """Why a signature does not take a call; None: it does."""
    words = [word for word in signature.split(", ") if word]
    names, positional, required, keyword_only = set[str](), 0, set[str](), False
    open_ended = any(word.startswith("**") for word in words)
    spread = any(word.startswith("*") and len(word) > 1 and word[1] != "*" for word in words)
    for word in words:
        if word.startswith("*") or word == "/":
            keyword_only |= word != "/"
            continue
        names.add(word.rstrip("="))
        positional += not keyword_only
        if not word.endswith("="):
            required.add(word)
    if "/" in words:
        names -= {word.rstrip("=") for word in words[: words.index("/")]}
    for keyword in use.keywords:
        if keyword not in names and not open_ended:
            return f"no argument {keyword}"
    if use.positional is None:
        return None
    if use.positional > positional and not spread:
        return f"takes {positional} positional arguments, not {use.positional}"
    order = [w.rstrip("=") for w in words if w != "/" and not w.startswith("*")][:positional]
    given = {*order[: use.positional], *use.keywords}
    if missing := sorted(required - given):
        return f"needs {', '.join(missing)}"
    return None


def download(package: str, version: str, folder: Path) -> Path:
    """Returns the wheel of a version, downloaded unless it is in the folder."""
    pattern = f"{package}-{version}-*.whl"
    if not list(folder.glob(pattern)):
        platforms = [word for name in _PLATFORMS for word in ("--platform", name)]
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder)]
        command += ["--only-binary=:all:", f"{package}=={version}", "--python-version", "3.12"]
        subprocess.run(command + (platforms if package == "torch" else []), check=True, timeout=600)
    return next(folder.glob(pattern))


def table(folder: Path) -> Table:
    """Returns the signatures of all that the sources use, from wheels in a folder."""
    names = sorted({use.name for use in uses(FOLDERS)})
    columns: dict[str, dict[str, Signatures]] = {name: {} for name in names}
    torch: Sources | None = None
    for package, versions in VERSIONS.items():
        for version in versions:
            wheel = zipfile.ZipFile(download(package, version, folder))
            sources = Sources(wheel, None if package == "torch" else torch)
            for name in names:
                if name.split(".")[0] == package or (package, name[:9]) == ("torch", "operator "):
                    columns[name][version] = sources.signatures(name)
            torch = sources if package == "torch" else torch
    return {
        name: first if all(each == first for each in column.values()) else column
        for name, column in columns.items()
        for first in [next(iter(column.values()))]
    }


def main() -> None:
    """Writes the table of signatures."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(temporary)
        written = {"versions": VERSIONS, "signatures": table(folder)}
    FILE.write_text(json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
    main()
