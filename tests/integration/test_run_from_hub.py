"""`areal run … model.path=org/name`: the model is fetched, served, trained and published."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.hub_server import Hub, serving

from areal_torch.models.tiny import make_tiny_model

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_run_when_the_model_is_on_the_hub_then_it_is_fetched_and_trained(tmp_path: Path) -> None:
    made = make_tiny_model(tmp_path / "made")
    recipe = ROOT / "examples" / "arithmetic_grpo.py"
    steps = ("total_train_steps=1", "train_dataset.batch_size=2", "gconfig.n_samples=2")
    with serving(Hub({file.name: file.read_bytes() for file in made.iterdir()})) as hub:
        ran = subprocess.run(
            [
                *(sys.executable, "-m", "areal_launch.cli", "run", str(recipe)),
                *("model.path=hf://lab/tiny@v1", "allocation_mode=sglang:d1+fsdp:d1", *steps),
            ],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=500,
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT / "services"),
                "HF_ENDPOINT": hub.url,
                "HOME": str(tmp_path),
            },
            check=False,
        )
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    assert "commit 0123456789" in ran.stdout
    (summary,) = (tmp_path / "runs").rglob("summary.json")
    assert json.loads(summary.read_text())["steps"] == 1
    assert (tmp_path / "models" / "lab--tiny@v1" / "model.safetensors").is_file()
