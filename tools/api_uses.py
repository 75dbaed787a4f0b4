"""Finds what the sources use of torch and transformers: dotted names, and how they are called.

    import torch.distributed as dist
    dist.new_group(ranks, timeout, backend, group_desc=what)
        -> torch.distributed.new_group, 3 positional arguments, keyword group_desc

Only imports are followed. A method of an object is seen where a table says of which class the
object is: `hf` is always a transformers model, and `OBJECTS` has the others.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("torch", "transformers")
MODEL = "transformers.PreTrainedModel"
OBJECTS = {
    "hf": MODEL,
    "converter": "transformers.core_model_loading.WeightConverter",
}
"""Name of a variable -> class of the object in it, in the files that train."""
METHODS = {
    "set_gradient_divide_factor": "torch.distributed.fsdp.FSDPModule",
    "set_force_sum_reduction_for_comms": "torch.distributed.fsdp.FSDPModule",
    "set_requires_gradient_sync": "torch.distributed.fsdp.FSDPModule",
    "set_reshard_after_backward": "torch.distributed.fsdp.FSDPModule",
    "_get_fsdp_state": "torch.distributed.fsdp.FSDPModule",
    "unshard": "torch.distributed.fsdp.FSDPModule",
    "reshard": "torch.distributed.fsdp.FSDPModule",
    "register_step_pre_hook": "torch.optim.Optimizer",
    "to_local": "torch.distributed.tensor.DTensor",
    "_init_weights": MODEL,
    "add_tensor": "transformers.core_model_loading.WeightConverter",
    "reverse_transform": "transformers.core_model_loading.WeightConverter",
    "was_used": "transformers.core_model_loading.WeightConverter",
}
"""Name of a method that only one class of these packages has -> that class."""
_OPERATOR = re.compile(r"(aten|torch_attn)::\w+")


@dataclass(frozen=True)
class Use:
    """One place where a name is used."""

    name: str
    """Full dotted name, or `operator aten::mm`."""
    where: str
    """`services/areal_torch/engines/fsdp.py:101`."""
    positional: int | None = None
    """Positional arguments of the call; None: it is not called, or their number is not known."""
    keywords: tuple[str, ...] = ()


def uses(folders: Iterable[Path]) -> list[Use]:
    """Returns every use of torch and transformers in the Python files of folders."""
    found: list[Use] = []
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            where = str(path.relative_to(ROOT))
            reader = _Reader(where, "areal_torch/engines" in where)
            found += reader.read(ast.parse(path.read_text()))
    return found


class _Reader:
    """Reads the uses in one file."""

    def __init__(self, where: str, trains: bool) -> None:
        self._where = where
        self._trains = trains
        self._names: dict[str, str] = {}

    def read(self, tree: ast.Module) -> list[Use]:
        found = [use for node in ast.walk(tree) for use in self._imported(node)]
        inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
        found += [use for node in calls.values() for use in self._looked_up(node)]
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute | ast.Name) and id(node) not in inner:
                found += self._use(node, calls.get(id(node)))
            elif isinstance(node, ast.Constant) and _OPERATOR.fullmatch(str(node.value)):
                found.append(self._at(node, f"operator {node.value}"))
        return found

    def _imported(self, node: ast.AST) -> Iterator[Use]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] in PACKAGES:
                    top = alias.name.split(".")[0]
                    self._names[alias.asname or top] = alias.name if alias.asname else top
                    yield self._at(node, alias.name)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            if str(node.module).split(".")[0] not in PACKAGES:
                return
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                self._names[alias.asname or alias.name] = full
                yield self._at(node, full)

    def _looked_up(self, node: ast.Call) -> Iterator[Use]:
        """`getattr(hf, "name", None)`: a name that a version may lack."""
        of, *names = node.args[:2] or [node.func]
        name = names[0] if names else None
        if (
            not self._trains
            or ast.unparse(node.func) != "getattr"
            or ast.unparse(of) not in OBJECTS
        ):
            return
        if isinstance(name, ast.Constant):
            yield self._at(node, f"{OBJECTS[ast.unparse(of)]}.{name.value}")

    def _chain(self, node: ast.expr) -> list[ast.expr]:
        chain = [node]
        while isinstance(chain[-1], ast.Attribute):
            chain.append(chain[-1].value)
        return chain

    def _use(self, node: ast.Attribute | ast.Name, call: ast.Call | None) -> Iterator[Use]:
        root = self._chain(node)[-1]
        parts = ast.unparse(node).split(".") if isinstance(root, ast.Name) else []
        if parts and parts[0] in self._names:
            yield self._at(node, ".".join([self._names[parts[0]], *parts[1:]]), call)
        elif not self._trains or not isinstance(node, ast.Attribute):
            return
        elif node.attr in METHODS:
            yield self._at(node, f"{METHODS[node.attr]}.{node.attr}", call)
        elif parts[:-1] and parts[-2] in OBJECTS:
            yield self._at(node, f"{OBJECTS[parts[-2]]}.{node.attr}", call)

    def _at(self, node: ast.stmt | ast.expr, name: str, call: ast.Call | None = None) -> Use:
        where = f"{self._where}:{node.lineno}"
        if call is None:
            return Use(name, where)
        spread = any(isinstance(each, ast.Starred) for each in call.args)
        spread |= any(each.arg is None for each in call.keywords)
        keywords = tuple(each.arg for each in call.keywords if each.arg is not None)
        return Use(name, where, None if spread else len(call.args), keywords)
