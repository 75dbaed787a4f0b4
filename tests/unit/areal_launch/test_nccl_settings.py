"""NCCL on both sides of a broadcast: the same settings, and a doctor that compares versions."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.unit.areal_launch.gpu_machines import install as machine
from tests.unit.areal_launch.supervised import python
from tests.unit.areal_launch.test_plan import make

from areal_launch.clusters.ray import RayLife
from areal_launch.doctor.local import Finding, examine_here
from areal_launch.processes.process import Child, ProcessSpec
from areal_launch.stack.plan import plan_stack
from areal_launch.view.output import CheckResult

SETTINGS = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
SHOW = f"import os; print(*(os.environ.get(key) for key in {list(SETTINGS)}))"
NO_CLUSTER = None


@pytest.mark.parametrize("name", ["trainer", "inference-0"])
async def test_process_when_started_then_nccl_is_set_as_on_the_other_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stack_id: str, name: str
) -> None:
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")  # a user's own, which servers would not have
    config, folder = make(tmp_path, "allocation_mode=sglang:d1+fsdp:d1")
    plan = plan_stack(config, folder, with_trainer=True)
    assert plan.trainer is not None
    (planned,) = (spec for spec in (*plan.inference, plan.trainer) if spec.name == name)
    spec = python(name, SHOW, tmp_path, environment=planned.environment)
    child = await Child.start(spec, stack_id)
    assert await child.wait() == 0
    assert spec.log.read_text().split() == ["0", "0"]
    away = RayLife(NO_CLUSTER, [], ProcessSpec(name, planned.argv, spec.log), stack_id)
    assert away._environment().items() >= SETTINGS.items()


def nccl_row(tmp_path: Path) -> Finding:
    overrides = ["stack.gpus_per_node=2", "weight_sync.transport=distributed"]
    config, _ = make(tmp_path / "runs", *overrides, "weight_sync.max_unavailable=0")
    found = {each.name: each for each in examine_here(config, can_prepare=False)}
    return found["nccl"]


def test_doctor_when_trainer_and_servers_have_other_versions_of_nccl_then_names_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def install(environment: Path, version: str) -> Path:
        site = environment / "lib/python3.11/site-packages"
        info = site / f"nvidia_nccl_cu12-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Name: nvidia-nccl-cu12\nVersion: {version}\n")
        return site

    machine(monkeypatch, tmp_path)
    server = tmp_path / ".venv-sglang-gpu"
    assert "the version in this environment is unknown" in nccl_row(tmp_path).found
    own = install(tmp_path / ".venv", "2.27.5")
    monkeypatch.setattr(sys, "path", [str(own), *sys.path])
    assert "the version in the servers' environment is unknown" in nccl_row(tmp_path).found
    install(server, "2.28.3")
    row = nccl_row(tmp_path)
    assert row.verdict is CheckResult.NOTE
    assert "2.27.5 for the trainer, 2.28.3 for the servers" in row.found
    assert "torch with NCCL 2.28.3" in row.fix
    install(tmp_path / "newer", "2.28.3")
    monkeypatch.setattr(
        sys, "path", [str(tmp_path / "newer/lib/python3.11/site-packages"), *sys.path]
    )
    assert nccl_row(tmp_path).verdict is CheckResult.OK
