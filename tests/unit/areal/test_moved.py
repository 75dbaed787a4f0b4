"""Recipes from before the torch half moved get the same modules, and are told where they are."""

from __future__ import annotations

import subprocess
import sys

import pytest

BOTH = """
import {former} as former
import {present} as present
assert former is present, (former, present)
assert present.__spec__.name == present.__name__ == "{present}", present.__spec__
"""


def python(code: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a process of its own: what is imported stays imported."""
    return subprocess.run(
        [sys.executable, "-c", code],
        timeout=60,
        check=False,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": "services"},
    )


MOVED = {
    "areal.algorithms.controls": "areal_torch.algorithms.controls",
    "areal.engines.parallel.estimate": "areal.memory_estimate",
    "areal.engines.ppo_actor": "areal_torch.engines.ppo_actor",
    "areal.engines.sft": "areal_torch.engines.sft",
    "areal.models.directory": "areal.model_directory",
    "areal.models.tiny": "areal_torch.models.tiny",
    "areal.rewards.sandbox": "areal.sandbox",
    "areal.rewards.sandbox.pool": "areal.sandbox.pool",
}


@pytest.mark.parametrize("first", ["former", "present"])
@pytest.mark.parametrize("former", MOVED)
def test_module_when_imported_by_both_names_then_it_is_one(former, first):
    code = BOTH.format(former=former, present=MOVED[former])
    if first == "present":
        code = f"import {MOVED[former]}\n" + code
    done = python(code)
    assert done.returncode == 0, done.stderr
    assert f"{former} is {MOVED[former]} since 0.3" in done.stderr


def test_present_name_when_imported_then_nothing_is_said():
    done = python("import areal, areal_torch.engines.ppo_actor; areal.FSDPPPOActor")
    assert (done.returncode, done.stderr) == (0, "")


def test_former_name_when_it_never_was_then_the_error_names_the_module():
    done = python("import areal_torch.engines.nothing_of_this_name")
    assert done.returncode == 1
    assert "No module named 'areal_torch.engines.nothing_of_this_name'" in done.stderr
