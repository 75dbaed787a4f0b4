"""Recipes: user files that several services load by the digest of their source. No pickle."""

from __future__ import annotations

import hashlib
import importlib
import linecache
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from functools import cached_property
from pathlib import Path
from types import FrameType, FunctionType, ModuleType
from typing import Any, TypeVar, cast

from areal import recipe_folder
from areal.config.experiment import BaseExperimentConfig
from areal.errors import InvalidInput, did_you_mean, nearest

_ATTRIBUTE = "__areal_recipe__"
_PREFIX = "areal_recipe_"

ConfigT = TypeVar("ConfigT", bound=BaseExperimentConfig)


@dataclass(frozen=True)
class Recipe:
    """The source of a recipe.

    Example:
        >>> Recipe.read(Path("examples/arithmetic_grpo.py")).digest[:8]
        '3f0c…'
    """

    file_name: str
    """File name shown in messages and tracebacks."""
    source: bytes

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of the source, in hex."""
        return hashlib.sha256(self.source).hexdigest()

    @classmethod
    def read(cls, path: Path) -> Recipe:
        """Reads a file, or packs a folder (`areal.recipe_folder`).

        Raises:
            InvalidInput: There is none (with the nearest name beside it), or it cannot be packed,
                or its path is not UTF-8.
        """
        if not recipe_folder.is_utf8(str(path.absolute())):  # it is written into UTF-8 files
            raise InvalidInput(f"recipe {str(path.absolute())!r}: expected a path in UTF-8")
        if path.is_dir():
            return cls(str(path), recipe_folder.pack(path))
        try:
            return cls(str(path), path.read_bytes())
        except OSError as error:
            beside = [str(path.with_name(each.name)) for each in path.parent.glob("*.py")]
            hint = "" if path.exists() else did_you_mean(str(path), beside)
            raise InvalidInput(f"recipe {str(path)!r}: {error.strerror}{hint}") from None


def load_recipe(source: bytes, file_name: str = "recipe.py") -> ModuleType:
    """Runs a recipe's source as a fresh module (not as `__main__`).

    Args:
        source: UTF-8 Python, of a file or of a packed folder.
        file_name: Name in messages and tracebacks: of the file or the folder.

    Raises:
        InvalidInput: One line with file and line: a syntax error, or what its top level raised.
    """
    recipe = Recipe(file_name, source)
    if recipe_folder.is_packed(source):
        return _load_folder(recipe)
    try:
        code = compile(source, file_name, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        where = f"{file_name}:{getattr(error, 'lineno', None) or 1}"
        raise InvalidInput(f"recipe {where}: {getattr(error, 'msg', error)}") from None
    module = ModuleType(f"{_PREFIX}{recipe.digest[:16]}")
    module.__file__ = file_name
    setattr(module, _ATTRIBUTE, recipe)
    # Dataclasses and type hints look their module up by name; tracebacks look up source lines.
    sys.modules[module.__name__] = module
    lines = source.decode(errors="replace").splitlines(keepends=True)
    linecache.cache[file_name] = (len(source), None, lines, file_name)
    try:
        exec(code, module.__dict__)  # noqa: S102 - running the user's recipe is the point
    except (Exception, SystemExit) as error:
        del sys.modules[module.__name__]
        raise _top_level_error(error, file_name, file_name) from None
    return module


def forget_recipe(module: ModuleType) -> None:
    """Drops a loaded recipe from the interpreter's tables of modules."""
    recipe_folder.forget(module.__name__.partition(".")[0])


def _load_folder(recipe: Recipe) -> ModuleType:
    """Imports recipe.py of a packed folder as a module of a package of its own."""
    package = f"{_PREFIX}{recipe.digest[:16]}"
    shown = recipe.file_name
    if shown.endswith(".py"):  # a packed file, as Kubernetes mounts it
        shown = str(Path(shown).parent)
    copy = recipe_folder.unpack(recipe.source, recipe.digest)
    files = recipe_folder.Files(package, copy, shown, (_ATTRIBUTE, recipe))
    files.install()
    try:
        return importlib.import_module(f"{package}.recipe")
    except (Exception, SystemExit) as error:
        recipe_folder.forget(package)
        beside = [each.stem for each in copy.path.glob("*.py")]
        if isinstance(error, ModuleNotFoundError) and error.name in beside:
            error.msg = f"{error.msg} (a file of the recipe: from . import {error.name})"
        raise _top_level_error(error, shown, str(Path(shown) / recipe_folder.ENTRY)) from None


def _top_level_error(error: BaseException, own: str, entry: str) -> InvalidInput:
    """Returns one line: what a recipe's top level raised, and where in its own file or folder."""
    inside = (own, own.rstrip("/") + "/")
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename == inside[0] or frame.filename.startswith(inside[1])
    ]
    where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else f"{entry}:1"
    said = f"{type(error).__name__}: {error}"
    if isinstance(error, SyntaxError):
        where, said = f"{error.filename}:{error.lineno or 1}", error.msg
    hint = ""
    if "no known parent package" in said and Path(own).name == recipe_folder.ENTRY:
        hint = f" (expected the folder: {str(Path(own).parent)!r})"
    if isinstance(error, ModuleNotFoundError):
        said = f"{type(error).__name__}: {error.msg}"
        if error.name == "torch":
            hint = " (import torch inside main: rollout and reward workers do not have it)"
    return InvalidInput(f"recipe {where}: {said}{hint}")


def find_config_class(module: ModuleType, default: type[ConfigT]) -> type[ConfigT]:
    """Returns the recipe's own experiment dataclass if it defines one, else `default`.

    Raises:
        InvalidInput: It defines several, none of which extends all others.
    """
    own = [
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, BaseExperimentConfig)
        and _same_recipe(value.__module__, module.__name__)
    ]
    leaves = [c for c in own if not any(o is not c and issubclass(o, c) for o in own)]
    if len(leaves) > 1:
        names = ", ".join(sorted(c.__name__ for c in leaves))
        raise InvalidInput(
            f"recipe {module.__file__}: several configuration classes ({names}): expected one"
        )
    if not leaves:
        return default
    if not is_dataclass(leaves[0]):
        raise InvalidInput(f"recipe {module.__file__}: {leaves[0].__name__} is not a @dataclass")
    return cast("type[ConfigT]", leaves[0])


def _same_recipe(one: str, other: str) -> bool:
    """Whether two modules are one, or are of one folder."""
    package = one.partition(".")[0]
    return one == other or (package.startswith(_PREFIX) and package == other.partition(".")[0])


def reference(part: Any) -> str:
    """Returns the name by which `find_part` finds a class or function of a recipe.

    That of a helper module of a folder begins with the module: `helpers.math:score`.
    """
    package, _, inner = part.__module__.partition(".")
    if package.startswith(_PREFIX) and inner not in ("", "recipe"):
        return f"{inner}:{part.__qualname__}"
    return str(part.__qualname__)


def find_part(module: ModuleType, name: str) -> Any:
    """Returns what `reference` named, in a loaded recipe; None: there is no such part."""
    inner, colon, rest = name.rpartition(":")
    value: Any = module
    if colon:
        package = module.__name__.partition(".")[0]
        if not all(part.isidentifier() for part in inner.split(".")):
            return None
        try:
            value = importlib.import_module(f"{package}.{inner}")
        except ImportError:
            return None
    for part in rest.split("."):
        value = getattr(value, part, None) if not part.startswith("__") else None
    return value


def function_reference(function: Callable[..., Any]) -> tuple[str, str]:
    """Returns (recipe digest, name) of a module-level function, as RewardService expects it."""
    check_module_level(function, "function")
    recipe = source_of(function)
    return (recipe.digest if recipe is not None else "", reference(function))


def source_of(part: Any) -> Recipe | None:
    """Returns the source of a class's or function's file; None for this library's own."""
    module_name = getattr(part, "__module__", "") or ""
    if module_name == "areal" or module_name.startswith("areal."):
        return None
    namespace = getattr(part, "__globals__", None) or vars(sys.modules.get(module_name, part))
    recipe = namespace.get(_ATTRIBUTE)
    if isinstance(recipe, Recipe):
        return recipe
    file = namespace.get("__file__")
    if not file:
        raise InvalidInput(f"{part.__qualname__}: expected it to be defined in a recipe file")
    return Recipe.read(Path(file))


def check_module_level(part: Any, what: str) -> None:
    """Raises InvalidInput for a class or function that workers cannot look up in the recipe."""
    if "<" in part.__qualname__:
        raise InvalidInput(
            f"{what} {part.__qualname__}: expected a definition at the top level of the "
            f"recipe, because workers look up its name"
        )


def find_function(module: ModuleType, name: str) -> Callable[..., Any]:
    """Returns a recipe's function by qualified name; raises InvalidInput with the nearest name."""
    value = find_part(module, name)
    if not callable(value):
        functions = [n for n, v in vars(module).items() if isinstance(v, FunctionType)]
        raise InvalidInput(
            f"recipe {module.__file__}: no function {name!r}{nearest(name, functions)}"
        )
    return cast("Callable[..., Any]", value)


def called_at() -> str:
    """Returns the line of a recipe that the caller was called from, as `FILE:LINE`.

    If no recipe is on the stack, the result is "a caller outside a recipe".
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if _ATTRIBUTE in frame.f_globals:
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "a caller outside a recipe"
