"""Host memory of a node with GPUs, and sizes of a model that is still to be downloaded."""

from __future__ import annotations

import json
import weakref
from pathlib import Path

import pytest
import torch
from tests.hub_server import Hub, serving
from tests.unit.areal_launch.gpu_machines import install
from tests.unit.areal_launch.test_memory import QWEN2_5_7B, seven_b

from areal.config.experiment import GRPOConfig, build_config
from areal.memory_estimate import GIB, ModelShape
from areal_launch.commands import doctor
from areal_launch.doctor import memory, model_config
from areal_launch.doctor.findings import Finding
from areal_launch.doctor.local import examine_here
from areal_launch.doctor.model_config import fetch_config
from areal_launch.view.output import CheckResult
from areal_torch.engines.model import fill, source
from areal_torch.engines.model.tensor_directory import TensorDirectory


def mixture(folder: Path) -> Path:
    """A tiny model with experts, whose files keep each expert's matrices apart."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=48,
        num_experts=8,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_loading_when_a_rank_reads_its_part_then_it_is_what_doctor_counts(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    folder = tiny_model if kind == "dense" else mixture(tmp_path)
    now, most, read = [0], [0], TensorDirectory.read

    def freed(size: int) -> None:
        now[0] -= size

    def counted(self: TensorDirectory, name: str, box: object = None) -> torch.Tensor:
        tensor = read(self, name, box)  # type: ignore[arg-type]
        now[0] += tensor.nbytes
        most[0] = max(most[0], now[0])
        weakref.finalize(tensor, freed, tensor.nbytes)
        return tensor

    monkeypatch.setattr(TensorDirectory, "read", counted)
    # Parameters stay on the meta device, as if they were on a GPU.
    fill.load_own(source.build(str(folder), torch.float32), folder)
    config = GRPOConfig(allocation_mode="sglang:d1+fsdp:d1")
    config.model.path = str(folder)
    loading = memory.host(config, ModelShape.read(folder), ranks=1).parts["loading"]
    assert most[0] <= loading <= 2.5 * most[0], (most[0], loading)


def test_host_when_7b_trains_on_eight_gpus_then_no_rank_holds_the_whole_model(
    tmp_path: Path,
) -> None:
    config = seven_b(tmp_path)
    shape = ModelShape.read(tmp_path)
    need = memory.host(config, shape, ranks=8)
    assert need.parts["loading"] < 3 * GIB  # it was 227 GiB
    assert need.parts["checkpoint"] == pytest.approx(12 * shape.parameters, rel=1e-3)
    assert need.total < 128 * GIB
    config.actor.offload = True
    offloaded = memory.host(config, shape, ranks=8)
    assert offloaded.parts["states"] == pytest.approx(16 * shape.parameters, rel=1e-3)
    config.allocation_mode = "sglang:d8+fsdp:d32"
    assert memory.host(config, shape, ranks=8).parts["states"] == pytest.approx(
        4 * shape.parameters, rel=1e-3
    )


def rows(config: GRPOConfig, described_in: Path | None) -> dict[str, Finding]:
    findings = examine_here(config, can_prepare=True, described_in=described_in)
    return {each.name: each for each in findings}


def test_doctor_when_the_model_is_on_the_hub_then_its_config_alone_gives_the_memory_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, tmp_path, free=79 * GIB)
    content = json.dumps(QWEN2_5_7B).encode()
    hub = Hub({"config.json": content, "model.safetensors": b"x" * 1000})
    overrides = ["stack.gpus_per_node=2", "allocation_mode=sglang:d1+fsdp:d1"]
    config = build_config(
        GRPOConfig, None, [f"run_root={tmp_path}", f"model.path={tmp_path / 'later'}", *overrides]
    )
    folder = tmp_path / "described"
    folder.mkdir()
    with serving(hub):
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        assert fetch_config("hf://lab/tiny@v1", folder)
    assert set(hub.fetched) == {"config.json"}
    found = rows(config, folder)
    assert "each rank needs about" in found["trainer memory"].found
    assert "its GPU has 79.0 GiB free" in found["trainer memory"].found
    assert found["trainer memory"].verdict is CheckResult.MISSING, "7B on one GPU"
    assert "each server needs about" in found["server memory"].found
    disk = found["disk"].found + found["disk"].fix
    needed = float(disk.partition("about ")[2].split()[0])
    assert needed > 15, "of a model of 15 GB that is not there yet"


def test_doctor_when_the_config_cannot_be_fetched_then_unknown_until_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, tmp_path)
    assert not fetch_config("s3://bucket/model", tmp_path)
    monkeypatch.setattr(model_config, "_ANSWER_S", 1.0)
    hub = Hub({"config.json": b"{}"}, stand_still=True)
    with serving(hub):
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        assert not fetch_config("hf://lab/tiny", tmp_path), "its deadline passes"
        hub.resume.set()
    overrides = ["stack.gpus_per_node=2", "allocation_mode=sglang:d1+fsdp:d1"]
    config = build_config(
        GRPOConfig, None, [f"run_root={tmp_path}", f"model.path={tmp_path / 'later'}", *overrides]
    )
    found = rows(config, None)
    for name in ("trainer memory", "server memory"):
        assert found[name].verdict is CheckResult.UNKNOWN
        assert found[name].found.startswith("unknown until the model is there")


def test_doctor_when_the_path_is_a_hub_name_then_the_command_fetches_its_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch, tmp_path, free=79 * GIB)
    monkeypatch.chdir(tmp_path)
    asked: list[str] = []

    def fetch(address: str, into: Path) -> bool:
        asked.append(address)
        (into / "config.json").write_text(json.dumps(QWEN2_5_7B))
        return True

    monkeypatch.setattr(doctor, "fetch_config", fetch)
    overrides = ["model.path=Qwen/Qwen2.5-7B", "stack.gpus_per_node=2", "actor.lora={}"]
    doctor.examine(
        "local", None, None, [*overrides, "allocation_mode=sglang:d1+fsdp:d1"], as_json=True
    )
    found = {each["name"]: each for each in json.loads(capsys.readouterr().out)}
    assert asked == ["hf://Qwen/Qwen2.5-7B"]
    assert "each rank needs about" in found["trainer memory"]["found"]
    assert "architecture" not in found, "there are no weights to test"
