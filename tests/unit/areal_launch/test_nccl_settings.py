"""NCCL on both sides of a broadcast: the same settings, and the same version or no start."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.unit.areal_launch.gpu_machines import install as machine
from tests.unit.areal_launch.supervised import python
from tests.unit.areal_launch.test_plan import make

from areal.config.experiment import BaseExperimentConfig
from areal.errors import CannotStart
from areal_launch.clusters.ray import RayLife
from areal_launch.doctor.gpus import refuse_unusable
from areal_launch.doctor.local import Finding, examine_here
from areal_launch.gpus.engine import Installed
from areal_launch.processes.process import Child, ProcessSpec
from areal_launch.stack.plan import plan_stack
from areal_launch.view.output import CheckResult

SETTINGS = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
SHOW = f"import os; print(*(os.environ.get(key) for key in {list(SETTINGS)}))"
NO_CLUSTER = None
TWO_GPUS = ("stack.gpus_per_node=2", "allocation_mode=sglang:d1+fsdp:d1")


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


def on_gpus(tmp_path: Path) -> BaseExperimentConfig:
    joined = ["weight_sync.transport=distributed", "weight_sync.max_unavailable=0"]
    config, _ = make(tmp_path / "runs", *TWO_GPUS, *joined)
    return config


def nccl_row(config: BaseExperimentConfig) -> Finding:
    found = {each.name: each for each in examine_here(config, can_prepare=False)}
    return found["nccl"]


def install(environment: Path, version: str) -> Path:
    site = environment / "lib/python3.11/site-packages"
    info = site / f"nvidia_nccl_cu12-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Name: nvidia-nccl-cu12\nVersion: {version}\n")
    return site


def test_run_when_trainer_and_servers_have_other_versions_of_nccl_then_it_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(monkeypatch, tmp_path)
    config = on_gpus(tmp_path)
    assert "the version in this environment is unknown" in nccl_row(config).found
    own = install(tmp_path / ".venv", "2.27.5")
    monkeypatch.setattr(sys, "path", [str(own), *sys.path])
    assert "the version in the servers' environment is unknown" in nccl_row(config).found
    refuse_unusable(config)  # NCCL may come in another way
    install(tmp_path / ".venv-sglang-gpu", "2.28.3")
    row = nccl_row(config)
    assert row.verdict is CheckResult.MISSING
    assert "NCCL 2.27.5 for the trainer, 2.28.3 for the servers" in row.found
    with pytest.raises(CannotStart, match=r"2\.27\.5 .*2\.28\.3 .*transport=disk$"):
        refuse_unusable(config)
    with_disk, _ = make(tmp_path / "disk", *TWO_GPUS)
    refuse_unusable(with_disk)
    monkeypatch.setattr(sys, "path", [str(install(tmp_path / "newer", "2.28.3")), *sys.path])
    assert nccl_row(config).verdict is CheckResult.OK
    refuse_unusable(config)


def test_run_when_sglang_is_absent_then_nccl_is_not_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(monkeypatch, tmp_path, sglang=Installed.ABSENT)
    config = on_gpus(tmp_path)
    assert "nccl" not in {each.name for each in examine_here(config, can_prepare=False)}
    with pytest.raises(CannotStart, match="make sglang-gpu"):
        refuse_unusable(config)
