"""What a worker imports to load a recipe brings no torch along."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "module",
    [
        "areal.config.training",
        "areal_torch.engines.ppo_actor",
        "areal_torch.engines.rollout",
        "areal_torch.engines.train_api",
        "areal_torch.models.tiny",
    ],
)
def test_module_when_imported_then_does_not_import_torch(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", code], timeout=60, check=False, env={"PYTHONPATH": "services"}
    )
    assert run.returncode == 0
