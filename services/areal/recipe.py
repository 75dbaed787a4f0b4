"""Recipes: user files that several services load by the digest of their source. No pickle.

trainer                        control plane                     rollout / reward worker
workflow object                                                  workflow object
| describe_workflow                                                  ^ build_workflow
v                                                                    |
WorkflowSpec(name, digest, kwargs) ──> task ──> lease ────────> WorkflowSpec
recipe_of(workflow).source ──> PutRecipe(digest) ──> GetRecipe ──> load_recipe
"""

from __future__ import annotations

import difflib
import hashlib
import inspect
import linecache
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, TypeVar, cast, get_args, get_type_hints

import orjson

import areal.types
from areal.config import BaseExperimentConfig
from areal.errors import InvalidInput
from areal.types import WorkflowSpec
from areal.workflows.base import RolloutWorkflow

_ATTRIBUTE = "__areal_recipe__"
_FUNCTION = "$function"
_DATACLASS = "$dataclass"

ConfigT = TypeVar("ConfigT", bound=BaseExperimentConfig)


@dataclass(frozen=True)
class Recipe:
    """A recipe's source.

    Example:
        >>> Recipe.read(Path("examples/arithmetic_grpo.py")).digest[:8]
        '3f0c…'
    """

    file_name: str
    """For messages and tracebacks."""
    source: bytes

    @cached_property
    def digest(self) -> str:
        """sha256 hex of the source."""
        return hashlib.sha256(self.source).hexdigest()

    @classmethod
    def read(cls, path: Path) -> Recipe:
        """Reads a file; raises InvalidInput when there is none."""
        try:
            return cls(str(path), path.read_bytes())
        except OSError as error:
            raise InvalidInput(f"recipe {str(path)!r}: {error.strerror}") from None


def builtin_workflows() -> dict[str, type[RolloutWorkflow]]:
    """Workflows that need no recipe, by the name that clients use."""
    from areal.workflows.rlvr import RLVRWorkflow

    return {"rlvr": RLVRWorkflow}


# ---------------------------------------------------------------- loading


def load_recipe(source: bytes, file_name: str = "recipe.py") -> ModuleType:
    """Runs a recipe's source as a fresh module (not as `__main__`).

    Args:
        source: UTF-8 Python.
        file_name: For messages and tracebacks.

    Raises:
        InvalidInput: One line with file and line: a syntax error, or what its top level raised.
    """
    recipe = Recipe(file_name, source)
    try:
        code = compile(source, file_name, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        where = f"{file_name}:{getattr(error, 'lineno', None) or 1}"
        raise InvalidInput(f"recipe {where}: {getattr(error, 'msg', error)}") from None
    module = ModuleType(f"areal_recipe_{recipe.digest[:16]}")
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
        frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == file_name]
        where = f"{file_name}:{frames[-1].lineno if frames else 1}"
        hint = ""
        if isinstance(error, ModuleNotFoundError) and error.name == "torch":
            hint = " (import torch inside main: rollout and reward workers have none)"
        raise InvalidInput(f"recipe {where}: {type(error).__name__}: {error}{hint}") from None
    return module


def find_config_class(module: ModuleType, default: type[ConfigT]) -> type[ConfigT]:
    """The recipe's own experiment dataclass if it defines one, else `default`.

    Raises:
        InvalidInput: It defines several, none of which extends all others.
    """
    own = [
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, BaseExperimentConfig)
        and value.__module__ == module.__name__
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


# ---------------------------------------------------------------- describing


def recipe_of(value: object) -> Recipe | None:
    """The recipe that defines a workflow (its class or its functions); None for a pure built-in.

    Raises:
        InvalidInput: Its parts come from different files, or from no file at all.
    """
    if not isinstance(value, RolloutWorkflow):
        return _source_of(cast("Any", value))
    parts: list[Any] = [type(value), *_functions_in(value._areal_arguments)]
    found: dict[str, Recipe] = {}
    for part in parts:
        recipe = _source_of(part)
        if recipe is not None:
            found.setdefault(recipe.digest, recipe)
    if len(found) > 1:
        names = ", ".join(sorted(r.file_name for r in found.values()))
        raise InvalidInput(
            f"workflow {type(value).__name__}: its class and functions come from different files "
            f"({names}): a recipe is one file"
        )
    return next(iter(found.values()), None)


def describe_workflow(workflow: RolloutWorkflow) -> WorkflowSpec:
    """Describes a workflow so that `build_workflow` can rebuild it in another process.

    Raises:
        InvalidInput: An argument is neither JSON, a dataclass nor a module-level function.
    """
    cls = type(workflow)
    builtin = {c: name for name, c in builtin_workflows().items()}
    if cls not in builtin:
        _check_module_level(cls, "workflow class")
    kwargs = {
        name: _encode(value, f"{cls.__name__}({name}=…)")
        for name, value in workflow._areal_arguments.items()
    }
    recipe = recipe_of(workflow)
    return WorkflowSpec(
        name=builtin.get(cls) or cls.__qualname__,
        recipe_digest=recipe.digest if recipe is not None else "",
        kwargs_json=orjson.dumps(kwargs, option=orjson.OPT_SORT_KEYS).decode(),
    )


def function_reference(function: Callable[..., Any]) -> tuple[str, str]:
    """(recipe digest, name) of a module-level function, as RewardService wants it."""
    _check_module_level(function, "function")
    recipe = _source_of(function)
    return (recipe.digest if recipe is not None else "", function.__qualname__)


def _source_of(part: Any) -> Recipe | None:
    """Source of the file that defines a class or function; None for this library's own."""
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


def _functions_in(value: Any) -> list[Callable[..., Any]]:
    if isinstance(value, FunctionType):
        return [value]
    if isinstance(value, dict):
        return [f for item in value.values() for f in _functions_in(item)]
    if isinstance(value, (list, tuple)):
        return [f for item in value for f in _functions_in(item)]
    return []


def _check_module_level(part: Any, what: str) -> None:
    if "<" in part.__qualname__:
        raise InvalidInput(
            f"{what} {part.__qualname__}: expected one defined at the top of the recipe, since "
            f"workers find it by name"
        )


def _encode(value: Any, where: str) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, FunctionType):
        _check_module_level(value, f"{where} function")
        return {_FUNCTION: value.__qualname__}
    if is_dataclass(value) and not isinstance(value, type):
        encoded = {
            item.name: _encode(getattr(value, item.name), f"{where}.{item.name}")
            for item in fields(value)
        }
        return {_DATACLASS: type(value).__qualname__, **encoded}
    if isinstance(value, (list, tuple)):
        return [_encode(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str) or key.startswith("$"):
                raise InvalidInput(f"{where}: key {key!r}: expected a string not starting with $")
        return {key: _encode(item, f"{where}[{key!r}]") for key, item in value.items()}
    raise InvalidInput(
        f"{where}: {type(value).__name__} does not travel to workers: expected JSON values, "
        f"a dataclass, or a function of the recipe"
    )


# ---------------------------------------------------------------- rebuilding


def build_workflow(spec: WorkflowSpec, module: ModuleType | None) -> RolloutWorkflow:
    """Rebuilds a described workflow.

    Args:
        spec: What `describe_workflow` made, or a client wrote.
        module: The loaded recipe of `spec.recipe_digest`; None when that is empty.

    Raises:
        InvalidInput: Unknown workflow or function (with the nearest name), arguments that do not
            fit, or what the constructor raised.
    """
    cls = find_workflow(spec.name, module)
    try:
        raw = orjson.loads(spec.kwargs_json or "{}")
    except orjson.JSONDecodeError as error:
        raise InvalidInput(f"workflow {spec.name!r} kwargs_json: not JSON ({error})") from None
    if not isinstance(raw, dict):
        raise InvalidInput(f"workflow {spec.name!r} kwargs_json: expected a JSON object")
    signature = inspect.signature(cls)
    known = signature.parameters
    if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in known.values()):
        for name in raw:
            if name not in known:
                raise InvalidInput(
                    f"workflow {spec.name!r}: unknown argument {name!r}{_near(name, list(known))}"
                )
    try:
        hints = get_type_hints(cls.__init__)
    except Exception:  # an annotation that only type checkers can resolve
        hints = {}
    kwargs = {
        name: _decode(value, hints.get(name), module, f"workflow {spec.name!r} {name}")
        for name, value in raw.items()
    }
    try:
        return cls(**kwargs)
    except InvalidInput:
        raise
    except Exception as error:
        raise InvalidInput(f"workflow {spec.name!r}: {type(error).__name__}: {error}") from None


def find_function(module: ModuleType, name: str) -> Callable[..., Any]:
    """A function of a recipe by qualified name; raises InvalidInput with the nearest name."""
    value: Any = module
    for part in name.split("."):
        value = getattr(value, part, None) if not part.startswith("__") else None
    if not callable(value):
        functions = [n for n, v in vars(module).items() if isinstance(v, FunctionType)]
        raise InvalidInput(
            f"recipe {module.__file__}: no function {name!r}{_near(name, functions)}"
        )
    return cast("Callable[..., Any]", value)


def find_workflow(name: str, module: ModuleType | None) -> type[RolloutWorkflow]:
    """A built-in or one of the recipe's; raises InvalidInput with the nearest name."""
    found: dict[str, type[RolloutWorkflow]] = dict(builtin_workflows())
    if module is not None:
        for key, value in vars(module).items():
            if isinstance(value, type) and issubclass(value, RolloutWorkflow):
                found[key] = value
    if name not in found:
        hint = "" if module is not None else " (built-ins only: workflow.recipe_digest is empty)"
        raise InvalidInput(
            f"workflow.name {name!r}: unknown workflow{_near(name, list(found))}{hint}"
        )
    return found[name]


def _near(name: str, options: list[str]) -> str:
    close = difflib.get_close_matches(name, options, n=1, cutoff=0.5)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; there is {', '.join(sorted(options))}" if options else ""


def _decode(value: Any, hint: Any, module: ModuleType | None, where: str) -> Any:
    if isinstance(value, list):
        return [_decode(item, None, module, f"{where}[{i}]") for i, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    if _FUNCTION in value:
        if module is None:
            raise InvalidInput(f"{where}: a function needs workflow.recipe_digest")
        return find_function(module, str(value[_FUNCTION]))
    if _DATACLASS in value:
        named = dict(value)
        cls = _find_dataclass(str(named.pop(_DATACLASS)), module, where)
        return _build_dataclass(cls, named, module, where)
    for option in (hint, *get_args(hint)):
        if isinstance(option, type) and is_dataclass(option):
            return _build_dataclass(option, value, module, where)
    return {key: _decode(item, None, module, f"{where}[{key!r}]") for key, item in value.items()}


def _find_dataclass(name: str, module: ModuleType | None, where: str) -> type:
    for space in (module, areal.types, sys.modules[BaseExperimentConfig.__module__]):
        candidate = getattr(space, name, None)
        if isinstance(candidate, type) and is_dataclass(candidate):
            return candidate
    raise InvalidInput(f"{where}: unknown dataclass {name!r}")


_PRIMITIVE = {int: (int,), float: (int, float), str: (str,), bool: (bool,)}


def _build_dataclass(cls: type, raw: dict[str, Any], module: ModuleType | None, where: str) -> Any:
    hints = get_type_hints(cls)
    kwargs: dict[str, Any] = {}
    for key, item in raw.items():
        if key not in hints:
            raise InvalidInput(f"{where}: unknown field {key!r}{_near(key, list(hints))}")
        value = _decode(item, hints[key], module, f"{where}.{key}")
        allowed = _PRIMITIVE.get(hints[key])
        if allowed and (
            not isinstance(value, allowed) or (isinstance(value, bool) and hints[key] is not bool)
        ):
            raise InvalidInput(f"{where}.{key} {value!r}: expected {hints[key].__name__}")
        kwargs[key] = value
    try:
        return cls(**kwargs)
    except InvalidInput:
        raise
    except Exception as error:
        raise InvalidInput(f"{where}: {type(error).__name__}: {error}") from None
