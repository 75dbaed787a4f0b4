"""The memory table's tracker, on a model small enough to add up by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from areal_torch.models.tiny import make_tiny_model

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import json, sys
from pathlib import Path
from tools.bench.memory import measure
path, layout, mode = sys.argv[1:]
print(json.dumps(measure(Path(path), layout, mode, 1024, 128)))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def measured(model: Path, layout: str, mode: str) -> int:
    """In a process of its own: the fake process group is the whole process's."""
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(model), layout, mode],
        cwd=ROOT,
        env={"PYTHONPATH": "services:.", "OMP_NUM_THREADS": "1", "HOME": str(model)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    return int(json.loads(ran.stdout.splitlines()[-1])["measured"])


@pytest.mark.long
def test_peak_when_ranks_and_recomputation_differ_then_it_follows(model: Path) -> None:
    from safetensors import safe_open

    with safe_open(model / "model.safetensors", "pt") as file:
        elements = sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118
    two = measured(model, "d2", "none")
    # Weights and both moments in 32 bits are always there; gradients at the peak of the backward.
    assert two >= 12 * elements / 2
    assert measured(model, "d8", "none") < two
    assert measured(model, "d2", "full") < two
