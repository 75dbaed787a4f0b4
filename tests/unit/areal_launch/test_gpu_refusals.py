"""What is said of GPUs beyond the truth table: ways out, GPUs left alone, other commands."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest
from tests.integration.stack_tools import environment
from tests.unit.areal_launch.gpu_machines import install

from areal.config.experiment import GRPOConfig, build_config
from areal.errors import CannotStart, ConfigError
from areal_launch.commands import serve
from areal_launch.doctor import gpus
from areal_launch.doctor.findings import Finding
from areal_launch.doctor.gpus import judge, look, refuse_unusable, unused_gpus
from areal_launch.gpus.engine import Installed
from areal_launch.processes.process import ProcessSpec
from areal_launch.processes.supervisor import StackFailure
from areal_launch.stack.events import EventLog
from areal_launch.stack.local import LocalStack
from areal_launch.view.output import CheckResult

ROOT = Path(__file__).resolve().parents[3]
SLICES = "MIG-a,MIG-b,MIG-c"


def make(*overrides: str) -> GRPOConfig:
    return build_config(GRPOConfig, None, list(overrides))


def row(config: GRPOConfig) -> Finding:
    return judge(config, look(config, memory=True)).gpus


@pytest.mark.parametrize("command", ["run", "up"])
def test_command_when_gpus_are_asked_for_on_a_machine_without_then_exit_1_and_one_line(
    tmp_path: Path, command: str, tiny_model: Path
) -> None:
    recipe = [str(ROOT / "examples/arithmetic_grpo.py")] if command == "run" else []
    overrides = ["stack.gpus_per_node=2", "allocation_mode=sglang:d1+fsdp:d1"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    ran = subprocess.run(
        [
            *(sys.executable, "-m", "areal_launch.cli", command, *recipe, *overrides),
            *(f"run_root={tmp_path / 'runs'}", f"model.path={tiny_model}"),
        ],
        capture_output=True,
        text=True,
        env={**environment(), "CUDA_VISIBLE_DEVICES": ""},
        timeout=120,
        check=False,
    )
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert ran.returncode == 1
    # A busy machine takes longer, but spends no more.
    assert spent.ru_utime + spent.ru_stime - before.ru_utime - before.ru_stime < 10.0
    assert not (tmp_path / "runs").exists(), "nothing was started"
    [line] = ran.stderr.splitlines()
    assert line.startswith("areal: stack.gpus_per_node 2: ")
    if command == "run":  # for up, torch is that of the servers
        assert "torch 2." in line
        assert "driver" in line
        assert "or set stack.gpus_per_node=0 to run on CPUs" in line


def test_doctor_when_gpus_are_left_alone_then_a_note_and_a_run_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, tmp_path, there=4)
    config = make("stack.gpus_per_node=0")
    found = row(config)
    assert found.verdict is CheckResult.NOTE
    assert found.found == "4 found, unused: servers and trainer compute on CPUs"
    assert found.fix == "set stack.gpus_per_node=4"
    assert unused_gpus(config) == f"{found.found}; {found.fix}"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert unused_gpus(config) == "", "the user has hidden them"


@pytest.mark.parametrize(
    ("overrides", "found", "fix"),
    [
        (
            ["stack.gpus_per_node=8", "allocation_mode=sglang:d1+fsdp:d1"],
            "2 of 8 used: trainer 0; servers 1",
            "set allocation_mode=sglang:d4+fsdp:d4",
        ),
        (
            ["stack.gpus_per_node=2", "allocation_mode=sglang:d1+fsdp:d1"],
            "2 of 8 used",
            "set allocation_mode=sglang:d4+fsdp:d4 stack.gpus_per_node=8",
        ),
        (
            ["stack.gpus_per_node=8", "allocation_mode=sglang:d1t2+fsdp:d2"],
            "4 of 8 used: trainer 0,1; servers 2,3",
            "set allocation_mode=sglang:d2t2+fsdp:d4",
        ),
        (
            ["stack.gpus_per_node=8", "allocation_mode=fsdp:d1"],
            "1 of 8 used: trainer 0",
            "set allocation_mode=fsdp:d8",
        ),
        (
            ["stack.gpus_per_node=8", "allocation_mode=sglang:d1+fsdp:d2t2"],
            "5 of 8 used",
            "choose a larger allocation_mode",
        ),
    ],
)
def test_doctor_when_gpus_stay_idle_then_an_allocation_that_takes_all(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    overrides: list[str],
    found: str,
    fix: str,
) -> None:
    install(monkeypatch, tmp_path)
    each = row(make(*overrides))
    assert each.verdict is CheckResult.NOTE
    assert found in each.found
    assert each.fix == fix
    better = make(*overrides, *fix.removeprefix("set ").split()) if "set " in fix else None
    assert better is None or row(better).verdict is CheckResult.OK


def test_gpus_when_slices_are_shared_out_then_each_process_gets_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, tmp_path, visible=SLICES)
    config = make("stack.gpus_per_node=3", "allocation_mode=sglang:d2+fsdp:d1")
    judged = judge(config, look(config, memory=True))
    assert (judged.trainer, judged.servers) == (("MIG-a",), ("MIG-b", "MIG-c"))
    assert judged.least_free(trainer=False) == judged.least_free(trainer=True) > 0
    two = make("stack.gpus_per_node=3", "allocation_mode=sglang:d1+fsdp:d2")
    with pytest.raises(CannotStart, match=r"a process sees one slice .* gives one 2; give the"):
        refuse_unusable(two)


def test_memory_when_other_gpus_are_busy_then_only_the_stacks_own_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, tmp_path)  # GPU 7 has least
    config = make("stack.gpus_per_node=8", "allocation_mode=sglang:d2+fsdp:d2")
    judged = judge(config, look(config, memory=True))
    assert judged.least_free(trainer=True) == 78 << 30
    assert judged.least_free(trainer=False) == 76 << 30


def test_up_when_only_sglang_uses_gpus_then_its_own_torch_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, tmp_path)
    asked: list[str] = []
    probe = gpus.probe

    def listen(python: str, *_: object, memory: bool = False) -> object:
        asked.append(python)
        return probe(python, memory=memory)

    monkeypatch.setattr(gpus, "probe", listen)
    config = make("stack.gpus_per_node=2", "allocation_mode=sglang:d1+fsdp:d1")
    refuse_unusable(config, with_trainer=False)
    assert asked == [str(tmp_path / ".venv-sglang-gpu/bin/python")]
    config.stack.inference_command = "serve"
    refuse_unusable(config, with_trainer=False)
    assert len(asked) == 1, "another program's environment is not known"


def test_serve_when_gpus_cannot_be_had_then_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_model: Path
) -> None:
    def start(*overrides: str, servers: int = 1) -> None:
        settings = [f"run_root={tmp_path / 'runs'}", *overrides]
        serve.serve_model(str(tiny_model), settings, servers=servers, port=30000, gpus=2)

    install(monkeypatch, tmp_path, there=2, sglang=Installed.HALF)
    with pytest.raises(CannotStart, match="SGLang is only half installed"):
        start()
    with pytest.raises(ConfigError, match=r"--gpus 2: expected 0 with stack.inference_command=cpu"):
        start("stack.inference_command=cpu")
    install(monkeypatch, tmp_path / "whole", there=2)
    with pytest.raises(CannotStart, match="2 found, 4 requested"):
        start(servers=2)
    monkeypatch.setattr(gpus, "device_files", lambda: 0)
    with pytest.raises(CannotStart, match="0 found, 2 requested"):
        start("stack.inference_command=serve")


async def test_serve_when_the_user_has_chosen_gpus_then_servers_get_those(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    placement = await serve._Servers(2, 2).open(make())
    assert [node.gpus for node in placement.inference] == [("4", "5"), ("6", "7")]


@pytest.mark.parametrize(("wanted", "seen"), [(0, ""), (2, None)])
async def test_prepare_when_the_stack_has_no_gpus_then_it_sees_none_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: int, seen: str | None
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    config = make(f"run_root={tmp_path}", f"stack.gpus_per_node={wanted}")
    stack = LocalStack(config, EventLog(), with_trainer=False)
    started: list[ProcessSpec] = []

    def start(spec: ProcessSpec) -> None:
        started.append(spec)
        raise StackFailure("that is all")

    monkeypatch.setattr(stack.supervisor, "start", start)
    with pytest.raises(StackFailure):
        await stack._prepare_model("")
    assert started[0].environment.get("CUDA_VISIBLE_DEVICES") == seen
