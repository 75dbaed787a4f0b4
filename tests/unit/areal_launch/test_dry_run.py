"""`areal run --dry-run`."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest
import yaml

from areal.errors import InvalidInput
from areal_launch.commands.dry_run import describe_run

ROOT = Path(__file__).resolve().parents[3]
RECIPE = ROOT / "examples" / "arithmetic_grpo.py"


def test_dry_run_when_on_slurm_then_the_job_script_and_nothing_is_made(tmp_path: Path) -> None:
    script = describe_run("slurm", RECIPE, None, [f"run_root={tmp_path}"])
    assert script.startswith("#!/bin/bash\n#SBATCH --job-name=areal-")
    assert f" run {RECIPE} " in script
    assert list(tmp_path.iterdir()) == []


def test_dry_run_when_on_kubernetes_then_the_objects_without_a_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    if shutil.which("helm", path=places) is None:
        pytest.skip("helm is not there: `make setup` brings it on Linux x86-64")
    monkeypatch.setenv("PATH", places)
    monkeypatch.setenv("KUBECONFIG", os.devnull)
    values = tmp_path / "values.yaml"
    values.write_text("image: {tag: dev}\ntrainer: {workload: Job}\n")
    text = describe_run(
        "kubernetes",
        RECIPE,
        None,
        [f"stack.kubernetes.values=[{values}]", f"run_root={tmp_path / 'runs'}"],
    )
    kinds = {each["kind"] for each in yaml.safe_load_all(text) if each}
    assert {"Deployment", "Job", "ConfigMap"} <= kinds
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("on", ["local", "ray"])
def test_dry_run_when_on_anything_else_then_refused(on: str) -> None:
    with pytest.raises(InvalidInput, match="expected --on kubernetes or --on slurm"):
        describe_run(on, RECIPE, None, [])
