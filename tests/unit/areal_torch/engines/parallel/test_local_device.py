"""A rank's device: its GPU, or an error where one was asked for; never the CPU instead."""

from __future__ import annotations

import re

import pytest
import torch

from areal.errors import ConfigError
from areal_torch.engines.parallel.mesh import local_device


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)


def test_device_when_no_gpu_is_asked_for_then_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert local_device() == torch.device("cpu")
    for hidden in ("", "-1", "NoDevFiles"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert local_device() == torch.device("cpu")


@pytest.mark.parametrize("visible", ["0", "4,5", "GPU-8932f937", "MIG-a1b2"])
def test_device_when_the_launcher_gave_a_gpu_that_torch_cannot_use_then_refused(
    monkeypatch: pytest.MonkeyPatch, visible: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(ConfigError, match=rf"asked for \(CUDA_VISIBLE_DEVICES={visible}\), but"):
        local_device()


def test_device_when_the_configuration_asks_then_torchs_build_and_why_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(
        ConfigError, match=rf"torch {re.escape(torch.__version__)} cannot .* CPUs only"
    ):
        local_device(gpu=True)

    def refuse() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old\n(found version 12040)")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", refuse)
    with pytest.raises(ConfigError, match=r"driver on your system is too old \(found .*--gpu"):
        local_device(gpu=True)


def test_device_when_there_are_fewer_gpus_than_ranks_then_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert local_device() == torch.device("cuda", 1)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ConfigError, match="local rank 2: expected a GPU for each rank"):
        local_device()
