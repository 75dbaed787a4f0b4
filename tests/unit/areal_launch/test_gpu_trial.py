"""`areal doctor --gpu`: each row tries one thing, has a deadline, and says what it met."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.integration.stack_tools import eventually, lives
from tests.unit.areal_launch.gpu_machines import install, torch_of, write_sglang
from tests.unit.areal_launch.test_memory import QWEN2_5_7B

from areal.config.experiment import GRPOConfig, build_config
from areal_launch.doctor import gpu_trial
from areal_launch.doctor.findings import Finding
from areal_launch.doctor.gpu_trial import try_on_gpus
from areal_launch.gpus.engine import Installed
from areal_launch.gpus.probe import TorchFound
from areal_launch.view.output import CheckResult
from areal_trainer.gpu_trial import one_layer

ROWS = ["cuda, trainer", "cuda, servers", "train step", "nccl pair", "sglang", "compiler"]
GPUS = ("stack.gpus_per_node=2", "allocation_mode=sglang:d1+fsdp:d1")


def tried(*overrides: str, model: Path | None = None) -> dict[str, Finding]:
    config = build_config(GRPOConfig, None, list(overrides))
    return {each.name: each for each in try_on_gpus(config, model)}


@pytest.mark.parametrize("overrides", [(), GPUS])
def test_trial_when_there_is_no_gpu_then_every_row_says_so_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...]
) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = tried(*overrides)
    assert list(found) == ROWS
    assert found["cuda, trainer"].verdict is CheckResult.MISSING
    assert "GPU" in found["cuda, trainer"].found
    for name in ("cuda, servers", "sglang"):
        assert "SGLang is not installed" in found[name].found
    for name in ("train step", "nccl pair"):
        assert found[name].verdict is CheckResult.UNKNOWN
        assert found[name].found == "not tried: CUDA does not start"
    assert not [each for each in found.values() if "\n" in each.found + each.fix]


def with_gpus(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    """Two GPUs, as far as torch is asked; what is started computes on CPUs."""
    install(monkeypatch, root, there=2)

    def probe(python: str, environment: object = None, *, memory: bool = False) -> TorchFound:
        return torch_of("cuda ok", {}, there=2)

    monkeypatch.setattr(gpu_trial, "probe", probe)
    monkeypatch.setattr(gpu_trial, "VARIABLE", "UNUSED")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(gpu_trial, "_assigned", lambda _: ("0", "1"))


def test_trial_when_everything_works_then_the_step_and_the_pair_are_real(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_gpus(monkeypatch, tmp_path)
    python = tmp_path / ".venv-sglang-gpu/bin/python"
    python.unlink()
    python.write_text("#!/bin/sh\necho 'a warning'; echo '{\"version\": \"0.5.23\"}'\n")
    python.chmod(0o755)
    for name in ("nvcc", "g++", "ninja"):
        (python.parent / name).write_text("#!/bin/sh\n")
        (python.parent / name).chmod(0o755)
    (tmp_path / "config.json").write_text(json.dumps(small(QWEN2_5_7B)))
    found = tried(*GPUS, model=tmp_path)
    assert {name: each.verdict for name, each in found.items()} == dict.fromkeys(
        ROWS, CheckResult.OK
    ), found
    assert "packed attention in float32 on cpu" in found["train step"].found
    assert found["train step"].found.startswith("one layer of the model, forward and backward")
    assert found["nccl pair"].found.startswith("2 ranks")
    assert found["sglang"].found.startswith("0.5.23 in ")
    assert found["cuda, trainer"].found.endswith("H100 0, H100 1")


@pytest.mark.parametrize(
    ("said", "verdict"),
    [
        ("Cuda compilation tools, release 13.2, V13.2.1", CheckResult.OK),  # torch: CUDA 13.0
        ("Cuda compilation tools, release 12.8, V12.8.93", CheckResult.NOTE),
        ("what is this", CheckResult.OK),
    ],
)
def test_compiler_when_nvcc_is_of_another_cuda_than_torch_then_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, verdict: CheckResult
) -> None:
    with_gpus(monkeypatch, tmp_path)
    folder = tmp_path / ".venv-sglang-gpu/bin"
    for name in ("nvcc", "g++", "ninja"):
        (folder / name).write_text(f"#!/bin/sh\necho '{said}'\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    config = build_config(GRPOConfig, None, list(GPUS))
    row = gpu_trial._compiler(config, str(folder / "python"))
    assert row.verdict is verdict
    if verdict is CheckResult.NOTE:
        assert "nvcc is of CUDA 12.8, and the servers' torch is built for CUDA 13.0" in row.found


def small(config: dict[str, object]) -> dict[str, object]:
    return {**config, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96}


def test_trial_when_parts_are_missing_then_their_rows_alone_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_gpus(monkeypatch, tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    python = tmp_path / ".venv-sglang-gpu/bin/python"
    python.unlink()
    python.write_text(
        "#!/bin/sh\necho 'Traceback' >&2; echo 'ImportError: no sgl_kernel' >&2; exit 1\n"
    )
    python.chmod(0o755)
    monkeypatch.setattr(gpu_trial, "_pair", lambda _: gpu_trial.ok(""))
    (tmp_path / "config.json").write_text('{"model_type": "nonsense"}')
    found = tried(*GPUS, model=tmp_path)
    assert found["sglang"].verdict is CheckResult.MISSING
    assert found["sglang"].found == "ImportError: no sgl_kernel"
    assert found["compiler"].verdict is CheckResult.NOTE
    assert found["compiler"].found.startswith("no nvcc, g++, ninja")
    assert found["train step"].verdict is CheckResult.MISSING
    assert "transformers cannot load it" in found["train step"].found


def test_trial_when_servers_need_no_gpu_then_their_rows_are_not_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_gpus(monkeypatch, tmp_path)
    monkeypatch.setattr(gpu_trial, "_assigned", lambda _: ())
    for overrides in (
        ["stack.inference_command=cpu"],
        ["allocation_mode=fsdp:d1"],
        ["endpoints.inference=[http://gpu:30000]"],
    ):
        found = tried("stack.gpus_per_node=1", *overrides)
        for name in ("cuda, servers", "sglang", "compiler"):
            assert found[name].found.startswith("not needed: ")
    own = tried("stack.gpus_per_node=2", "stack.inference_command=docker run sglang")
    assert "does not begin with a Python" in own["sglang"].found


def test_trial_when_a_row_hangs_then_its_processes_end_at_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_trial, "ROW_S", 5.0)
    file = tmp_path / "pid"
    script = f"sleep 99 & echo $! > {file}; echo Initializing >&2; wait"
    found = gpu_trial._run(["/bin/sh", "-c", script], {})
    assert isinstance(found, Finding)
    assert found.found == "no answer within 5 s: Initializing"
    pid = int(file.read_text())
    # It has been killed, and ends when it next gets a core.
    eventually(lambda: not lives(pid, "sleep"), "the end of what the row started", 60.0)


def test_one_layer_when_cut_then_heads_keep_their_width() -> None:
    found = one_layer(
        {**QWEN2_5_7B, "layer_types": ["full_attention"] * 28, "pad_token_id": 151643}
    )
    assert (found["num_hidden_layers"], found["layer_types"]) == (1, ["full_attention"])
    assert found["vocab_size"] == 256
    assert "pad_token_id" not in found
    assert found["hidden_size"] == QWEN2_5_7B["hidden_size"]
    seeing = one_layer({"text_config": dict(QWEN2_5_7B), "image_token_id": 5})
    assert seeing["text_config"]["num_hidden_layers"] == 1
    assert seeing["text_config"]["vocab_size"] == QWEN2_5_7B["vocab_size"]


@pytest.mark.long
def test_pair_when_two_ranks_join_then_they_sum(tmp_path: Path) -> None:
    ran = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", "-m", "areal_trainer.gpu_trial", "pair"),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={
            **os.environ,
            "PYTHONPATH": str(Path(__file__).resolve().parents[3] / "services"),
            "CUDA_VISIBLE_DEVICES": "",
        },
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert json.loads(ran.stdout.splitlines()[-1]) == {"device": "cpu", "ranks": 2, "nccl": ""}


def test_sglang_when_its_environment_is_half_then_nothing_runs_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    write_sglang(tmp_path, Installed.HALF)
    found = tried(*GPUS)
    assert "SGLang is only half installed" in found["sglang"].found
    assert "run `make sglang-gpu` again" in found["sglang"].fix


def test_pair_when_servers_and_trainer_share_a_gpu_then_it_is_tried_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, tmp_path, there=1)
    overrides = ["allocation_mode=sglang:d1|fsdp:d1", "stack.gpus_per_node=1"]
    config = build_config(GRPOConfig, None, overrides)
    assert gpu_trial._assigned(config) == ("0",)
