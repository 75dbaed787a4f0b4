"""Describes a workflow as data, to send it from the trainer to the rollout workers. No pickle.

trainer                        control plane                     rollout worker
workflow object                                                  workflow object
| describe_workflow                                                  ^ build_workflow
v                                                                    |
WorkflowSpec(name, digest, kwargs) ──> task ──> lease ────────> WorkflowSpec
recipe_of(workflow).source ──> PutRecipe(digest) ──> GetRecipe ──> load_recipe
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from types import FunctionType, ModuleType
from typing import Any, cast, get_args, get_type_hints

import orjson

import areal.types
from areal.config.experiment import BaseExperimentConfig
from areal.errors import InvalidInput, nearest
from areal.recipe import (
    Recipe,
    check_module_level,
    find_function,
    find_part,
    reference,
    source_of,
)
from areal.tokenizer.json_text import dumps, loads
from areal.types import WorkflowSpec
from areal.workflows.base import RolloutWorkflow

_FUNCTION = "$function"
_DATACLASS = "$dataclass"


def builtin_workflows() -> dict[str, type[RolloutWorkflow]]:
    """Workflows that need no recipe, by the name that clients use."""
    from areal.workflows.environment import EnvWorkflow
    from areal.workflows.multi_turn import MultiTurnWorkflow
    from areal.workflows.rlvr import RLVRWorkflow

    return {"rlvr": RLVRWorkflow, "multi_turn": MultiTurnWorkflow, "env": EnvWorkflow}


# ---------------------------------------------------------------- describing


def recipe_of(value: object) -> Recipe | None:
    """Returns the recipe that defines a workflow (its class or its functions); None for a built-in.

    Raises:
        InvalidInput: Its parts come from different files, or from no file at all.
    """
    if not isinstance(value, RolloutWorkflow):
        return source_of(cast("Any", value))
    parts: list[Any] = [type(value), *_functions_in(value._areal_arguments)]
    found: dict[str, Recipe] = {}
    for part in parts:
        recipe = source_of(part)
        if recipe is not None:
            found.setdefault(recipe.digest, recipe)
    if len(found) > 1:
        names = ", ".join(sorted(r.file_name for r in found.values()))
        raise InvalidInput(
            f"workflow {type(value).__name__}: its class and functions come from different files "
            f"({names}): expected one file, the recipe, or one folder (docs/tutorial.md)"
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
        check_module_level(cls, "workflow class")
    kwargs = {
        name: _encode(value, f"{cls.__name__}({name}=…)")
        for name, value in workflow._areal_arguments.items()
    }
    recipe = recipe_of(workflow)
    return WorkflowSpec(
        name=builtin.get(cls) or reference(cls),
        recipe_digest=recipe.digest if recipe is not None else "",
        kwargs_json=dumps(kwargs, option=orjson.OPT_SORT_KEYS).decode(),
    )


def _functions_in(value: Any) -> list[Callable[..., Any]]:
    if isinstance(value, (FunctionType, type)):
        return [value]
    if isinstance(value, dict):
        return [f for item in value.values() for f in _functions_in(item)]
    if isinstance(value, (list, tuple)):
        return [f for item in value for f in _functions_in(item)]
    return []


def _encode(value: Any, where: str) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (FunctionType, type)):
        check_module_level(value, f"{where} function or class")
        return {_FUNCTION: reference(value)}
    if is_dataclass(value) and not isinstance(value, type):
        encoded = {
            item.name: _encode(getattr(value, item.name), f"{where}.{item.name}")
            for item in fields(value)
        }
        return {_DATACLASS: reference(type(value)), **encoded}
    if isinstance(value, (list, tuple)):
        return [_encode(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str) or key.startswith("$"):
                raise InvalidInput(f"{where}: key {key!r}: expected a string not starting with $")
        return {key: _encode(item, f"{where}[{key!r}]") for key, item in value.items()}
    raise InvalidInput(
        f"{where}: {type(value).__name__} cannot be sent to workers: expected JSON values, "
        f"a dataclass, or a function of the recipe"
    )


# ---------------------------------------------------------------- rebuilding


def build_workflow(spec: WorkflowSpec, module: ModuleType | None) -> RolloutWorkflow:
    """Rebuilds a described workflow.

    Args:
        spec: A description by `describe_workflow` or by a client.
        module: The loaded recipe of `spec.recipe_digest`; None when that is empty.

    Raises:
        InvalidInput: Unknown workflow or function (with the nearest name), arguments that do not
            fit, or what the constructor raised.
    """
    cls = find_workflow(spec.name, module)
    try:
        raw = loads(spec.kwargs_json or "{}")
    except ValueError as error:
        raise InvalidInput(f"workflow {spec.name!r} kwargs_json: not JSON ({error})") from None
    if not isinstance(raw, dict):
        raise InvalidInput(f"workflow {spec.name!r} kwargs_json: expected a JSON object")
    signature = inspect.signature(cls)
    known = signature.parameters
    if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in known.values()):
        for name in raw:
            if name not in known:
                raise InvalidInput(
                    f"workflow {spec.name!r}: unknown argument {name!r}{nearest(name, list(known))}"
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


def find_workflow(name: str, module: ModuleType | None) -> type[RolloutWorkflow]:
    """Returns a built-in, one of the recipe's or one that `areal` exports.

    Raises:
        InvalidInput: There is none; the message has the nearest name.
    """
    found: dict[str, type[RolloutWorkflow]] = dict(builtin_workflows())
    exported = getattr(areal, name) if name in areal.__all__ else None
    if isinstance(exported, type) and issubclass(exported, RolloutWorkflow):
        found[name] = exported
    if module is not None:
        for key, value in vars(module).items():
            if isinstance(value, type) and issubclass(value, RolloutWorkflow):
                found[key] = value
        part = find_part(module, name) if ":" in name else None
        if isinstance(part, type) and issubclass(part, RolloutWorkflow):
            found[name] = part
    if name not in found:
        hint = "" if module is not None else " (built-ins only: workflow.recipe_digest is empty)"
        raise InvalidInput(
            f"workflow.name {name!r}: unknown workflow{nearest(name, list(found))}{hint}"
        )
    return found[name]


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
        if ":" in name and module is not None:
            candidate = find_part(module, name)
        if isinstance(candidate, type) and is_dataclass(candidate):
            return candidate
    raise InvalidInput(f"{where}: unknown dataclass {name!r}")


_PRIMITIVE = {int: (int,), float: (int, float), str: (str,), bool: (bool,)}


def _build_dataclass(cls: type, raw: dict[str, Any], module: ModuleType | None, where: str) -> Any:
    hints = get_type_hints(cls)
    kwargs: dict[str, Any] = {}
    for key, item in raw.items():
        if key not in hints:
            raise InvalidInput(f"{where}: unknown field {key!r}{nearest(key, list(hints))}")
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
