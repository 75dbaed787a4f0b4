"""Who gets which GPU, or which message, on every kind of machine; `run` and `doctor` agree."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
from tests.unit.areal_launch.gpu_machines import TOO_OLD, install
from tests.unit.areal_launch.test_sharing import write_model

from areal.config.allocation import AUTO
from areal.config.experiment import GRPOConfig
from areal.errors import CannotStart
from areal_launch.clusters.base import Cluster
from areal_launch.doctor.findings import Finding
from areal_launch.doctor.gpus import judge, look, refuse_unusable, unused_gpus
from areal_launch.doctor.local import examine_here
from areal_launch.doctor.settle import settle_here
from areal_launch.gpus.engine import Installed
from areal_launch.run_folder import RunFolder
from areal_launch.stack.plan import plan_stack

UUIDS = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6,GPU-1b2c3d4e-0000-4106-c12f-20bd9faed9f7"
SLICES = "MIG-a1b2c3d4-0000-5555-8888-20bd9faed9f6,MIG-a1b2c3d4-0001-5555-8888-20bd9faed9f6"
NAMES = {
    None: tuple(map(str, range(8))),
    "4,5": ("4", "5"),
    UUIDS: tuple(UUIDS.split(",")),
    SLICES: tuple(SLICES.split(",")),
}
APART, TOGETHER = "sglang:d1+fsdp:d1", "sglang:d1|fsdp:d1"
COMBINATIONS = list(
    product(
        (APART, TOGETHER, AUTO),
        (0, 1, 2, 8),
        NAMES,
        ("cpu build", "cuda ok", "driver too old"),
        Installed,
    )
)


def expected(allocation: str, gpus: int, visible: str | None, torch: str, sglang: Installed) -> str:
    """What the message says; "" where the run may start."""
    there = len(NAMES[visible])
    if not gpus:
        return ""
    if torch == "cpu build":
        return "torch 2.14.1+cpu (built for CPU), driver 580.65.06: a CPU build uses no GPU"
    if torch == "driver too old":
        return f"torch 2.14.1 (built for CUDA 13.0), driver 550.54.14: {TOO_OLD}"
    if gpus > there:
        return f"{there} found, {gpus} requested (CUDA_VISIBLE_DEVICES={visible})"
    if gpus == 1 and allocation == APART:
        return "needs 2 GPUs for 1 trainer rank and 1 server"
    if sglang is Installed.ABSENT:
        return "SGLang is not installed in"
    return "SGLang is only half installed in" if sglang is Installed.HALF else ""


def used(allocation: str, gpus: int) -> tuple[int, bool]:
    """How many of its GPUs a stack uses, and whether servers and trainer use the same."""
    if allocation == AUTO:
        return gpus, gpus == 1
    return (1, True) if allocation == TOGETHER else (2, False)


def make(folder: Path, allocation: str, gpus: int) -> GRPOConfig:
    config = GRPOConfig(run_root=str(folder / "runs"), allocation_mode=allocation)
    config.stack.gpus_per_node = gpus
    config.model.path = str(write_model(folder / "model", "0.5B"))
    return config


def run(config: GRPOConfig) -> str:
    """What `areal run` says and ends with; "" where it starts."""
    try:
        settle_here(config)
        refuse_unusable(config)
    except CannotStart as error:
        return str(error)
    return ""


def doctor(config: GRPOConfig) -> list[Finding]:
    """The rows of `areal doctor` on allocation, GPUs and engine."""
    rows = {row.name: row for row in examine_here(config, can_prepare=True)}
    return [rows[name] for name in ("allocation", "gpus", "engine") if name in rows]


@pytest.mark.parametrize(
    ("allocation", "gpus", "visible", "torch", "sglang"),
    COMBINATIONS,
    ids=["-".join(str(part)[:14].replace(" ", "_") for part in each) for each in COMBINATIONS],
)
async def test_gpus_when_a_stack_asks_for_them_then_it_gets_its_own_or_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    allocation: str,
    gpus: int,
    visible: str | None,
    torch: str,
    sglang: Installed,
) -> None:
    install(monkeypatch, tmp_path, torch=torch, sglang=sglang, visible=visible)
    config = make(tmp_path, allocation, gpus)
    said, names = expected(allocation, gpus, visible, torch, sglang), NAMES[visible]
    rows = doctor(config)
    problems = [
        f"{row.found}; {row.fix}".removesuffix("; see the message")
        for row in rows
        if row.verdict.fatal
    ]
    refused = run(config)
    if said:
        assert said in problems[0]
        asked = f"stack.gpus_per_node {gpus}: "
        assert refused == asked + problems[0].removeprefix(asked)
        assert "\n" not in refused
        assert not [each for each in problems if AUTO in each], "it says of no other machine"
        return
    assert not problems
    assert not refused
    placement = await Cluster().open(config)
    plan = plan_stack(config, RunFolder(config.run_dir), with_trainer=True, placement=placement)
    assert plan.trainer is not None
    trainer, *servers = (
        each.environment["CUDA_VISIBLE_DEVICES"].split(",")
        for each in (plan.trainer, *plan.inference)
    )
    if not gpus:
        assert [trainer, *servers] == [[""], [""]]
    else:
        count, shared = used(allocation, gpus)
        serving = [name for server in servers for name in server]
        assert trainer == list(names[: len(trainer)])
        assert serving == (trainer if shared else list(names[len(trainer) : count]))
        assert len({*trainer, *serving}) == count
        said = f"trainer {','.join(trainer)}; servers {','.join(serving)};"
        assert said in next(row.found for row in rows if row.name == "gpus")
    for server in plan.inference:
        assert (server.argv[2] == "areal_inference") == (gpus == 0), "SGLang where there are GPUs"
    unused = f"{len(names)} found, unused"
    assert (unused in " ".join(row.found for row in rows)) == (gpus == 0)
    assert (unused in unused_gpus(config)) == (gpus == 0)


def test_doctor_when_it_reports_then_its_rows_are_those_of_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, tmp_path, sglang=Installed.HALF)
    config = make(tmp_path, APART, 2)
    rows = {row.name: row for row in examine_here(config, can_prepare=True)}
    assert [rows[name] for name in ("gpus", "engine")] == judge(config, look(config)).findings
    assert rows["engine"].verdict.fatal


def test_table_when_it_is_generated_then_every_message_is_in_it() -> None:
    outcomes = {expected(*each) for each in COMBINATIONS}
    assert len(COMBINATIONS) == 3 * 4 * 4 * 3 * 3
    assert len(outcomes) == 9, sorted(outcomes)
