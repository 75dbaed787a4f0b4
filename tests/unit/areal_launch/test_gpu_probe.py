"""What an environment's torch is found to do, and which GPUs the user lends."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.areal_launch.gpu_machines import TOO_OLD, write_torch

from areal.config.experiment import GRPOConfig
from areal_launch.doctor.gpus import Machine, judge
from areal_launch.gpus import probe as module
from areal_launch.gpus.engine import Installed
from areal_launch.gpus.probe import Device, TorchFound, driver_version, probe
from areal_launch.gpus.visible import device_files, lent, listed


def found_with(folder: Path, *, memory: bool = False, visible: str | None = None) -> TorchFound:
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    if visible is not None:
        environment["CUDA_VISIBLE_DEVICES"] = visible
    return probe(sys.executable, environment, memory=memory)


def test_probe_when_cuda_starts_then_each_visible_gpu_with_its_memory(tmp_path: Path) -> None:
    write_torch(tmp_path, version="2.14.1", cuda="13.0", error="", count=2)
    found = found_with(tmp_path, memory=True)
    assert found.build == "CUDA 13.0"
    assert found.devices == (Device("Fake 0", 80 << 30), Device("Fake 1", 79 << 30))
    assert found_with(tmp_path, visible="7").devices == (Device("Fake 0"),)
    assert found_with(tmp_path, visible="").devices == ()


def test_probe_when_the_driver_is_too_old_then_what_torch_says_of_it(tmp_path: Path) -> None:
    write_torch(tmp_path, version="2.14.1", cuda="13.0", error=f"{TOO_OLD}\nUpdate it", count=2)
    found = found_with(tmp_path)
    assert (found.error, found.devices) == (f"{TOO_OLD} Update it", ())


def test_probe_when_torch_is_built_for_cpus_then_it_is_not_even_imported(tmp_path: Path) -> None:
    package = write_torch(tmp_path, version="2.14.1+cpu", cuda=None, error="", count=0) / "torch"
    (package / "__init__.py").write_text("raise SystemExit('imported')")
    found = found_with(tmp_path)
    assert (found.version, found.build, found.error) == ("2.14.1+cpu", "CPU", "")


def test_probe_when_torch_is_built_for_rocm_then_row_and_refusal_say_so_and_gpus_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_torch(tmp_path, version="2.14.1+rocm7.0", cuda=None, hip="7.0", error="", count=2)
    monkeypatch.setattr(module, "driver_version", lambda: "")
    found = found_with(tmp_path, memory=True)
    assert (found.build, found.error) == ("ROCm 7.0", "")
    assert found.devices == (Device("Fake 0", 80 << 30), Device("Fake 1", 79 << 30))
    said = "torch 2.14.1+rocm7.0 (built for ROCm 7.0)"
    config = GRPOConfig(allocation_mode="sglang:d1+fsdp:d1")
    config.stack.gpus_per_node = 2
    machine = Machine({}, found, Installed.WHOLE)
    assert judge(config, machine).gpus.found == f"trainer 0; servers 1; {said}"
    config.stack.gpus_per_node = 3
    assert judge(config, machine).gpus.found == "2 found, 3 requested"
    unusable = replace(machine, torch=replace(found, devices=(), error="no ROCm GPUs"))
    refused = f"no GPU can be used: {said}, no GPU driver found: no ROCm GPUs"
    assert judge(config, unusable).gpus.found == refused


def test_probe_when_python_or_its_answer_is_missing_then_that_is_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "No such file" in probe(str(tmp_path / "python")).error
    package = write_torch(tmp_path, version="2.14.1", cuda="13.0", error="", count=0) / "torch"
    (package / "cuda.py").write_text("import os\ndef init(): os._exit(3)\n")
    assert found_with(tmp_path).error == "exit code 3"
    (package / "cuda.py").write_text("import time\ndef init(): time.sleep(60)\n")
    monkeypatch.setattr(module, "PROBE_S", 1.0)
    assert found_with(tmp_path).error == "it did not answer within 1 s"


def test_driver_when_the_kernel_or_only_nvidia_smi_knows_it_then_its_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "version"
    file.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  Thu Feb 22 2024\n")
    assert driver_version(file) == "550.54.14"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert driver_version(tmp_path / "none") == ""
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 580.65.06\necho 580.65.06\n")
    program.chmod(0o755)
    assert driver_version(tmp_path / "none") == "580.65.06"


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ("4,5", ("4", "5")),
        (" 4, GPU-ab-12 ,MIG-GPU-ab/1/0", ("4", "GPU-ab-12", "MIG-GPU-ab/1/0")),
        ("0,-1,1", ("0",)),
        ("-1", ()),
        ("", ()),
        ("NoDevFiles", ()),
    ],
)
def test_listed_when_the_user_names_gpus_then_those_that_cuda_takes(
    value: str, names: tuple[str, ...]
) -> None:
    assert listed({"CUDA_VISIBLE_DEVICES": value}) == names
    assert lent({"CUDA_VISIBLE_DEVICES": value}, 8) == names


def test_lent_when_no_gpus_are_named_then_as_many_as_there_are() -> None:
    assert listed({}) is None
    assert lent({}, 3) == ("0", "1", "2")


@pytest.mark.parametrize(
    ("files", "count"),
    [(["nvidia0", "nvidia1", "nvidiactl"], 2), (["dxg"], 1), (["kfd"], 1), (["null"], 0)],
)
def test_device_files_when_a_driver_is_there_then_its_gpus_also_on_wsl_and_rocm(
    tmp_path: Path, files: list[str], count: int
) -> None:
    for name in files:
        (tmp_path / name).touch()
    assert device_files(tmp_path) == count
