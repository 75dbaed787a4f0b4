"""What is given to Slurm's programs, and how their answers are read."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from areal.config.experiment import GRPOConfig, build_config
from areal.errors import ArealError, ConfigError, NotFound
from areal_launch.clusters.slurm import (
    SlurmCluster,
    end_job,
    in_allocation,
    job_state,
    render_script,
    step_argv,
    submit,
)
from areal_launch.processes.process import Node, ProcessSpec


def script_of(tmp_path: Path, *overrides: str) -> str:
    config = build_config(GRPOConfig, None, list(overrides))
    config.recipe = "/shared/my recipe.py"
    return render_script(config, tmp_path, tmp_path / "job.yaml")


def options_of(script: str) -> dict[str, str]:
    lines = [line.removeprefix("#SBATCH --") for line in script.splitlines() if "#SBATCH" in line]
    return {key: value for key, _, value in (line.partition("=") for line in lines)}


class Program:
    """An executable on PATH that writes its arguments down and answers what it is told."""

    def __init__(self, folder: Path, name: str, answer: str = "", error: str = "") -> None:
        self._calls = folder / f"{name}.calls"
        (folder / f"{name}.out").write_text(answer)
        (folder / f"{name}.err").write_text(error)
        program = folder / name
        program.write_text(
            f'#!/bin/sh\necho "$@" >> {self._calls}\nenv > {folder / name}.env\n'
            f"cat {folder / name}.out\ncat {folder / name}.err >&2\nexit {int(bool(error))}\n"
        )
        program.chmod(0o755)

    @property
    def calls(self) -> list[str]:
        return self._calls.read_text().splitlines()


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return folder


def test_script_when_rendered_then_it_is_the_same_command_inside_the_job(tmp_path: Path) -> None:
    script = script_of(
        tmp_path,
        "allocation_mode=sglang:d5+fsdp:d4",
        "stack.gpus_per_node=8",
        "stack.slurm.setup=module load cuda",
        "stack.slurm.sbatch=[--partition=h100, --time=12:30:00, --qos=high]",
    )
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert options_of(script) == {
        "job-name": "areal-experiment-trial0",
        "output": f"{tmp_path}/slurm-%j.out",
        "open-mode": "append",
        "nodes": "2",
        "ntasks-per-node": "1",
        "signal": "B:TERM@60",
        "partition": "h100",
        "time": "12:30:00",
        "gpus-per-node": "8",
        "exclusive": "",
        "mem": "0",
        "qos": "high",
    }
    *_, setup, command = script.splitlines()
    assert setup == "module load cuda"
    assert command.startswith("exec ")
    assert f"-m areal_launch.cli run '/shared/my recipe.py' --config {tmp_path}/job.yaml" in command
    assert command.endswith("--on slurm --accept-changes")


def test_script_when_cpus_are_given_then_the_nodes_are_shared(tmp_path: Path) -> None:
    options = options_of(script_of(tmp_path, "stack.slurm.sbatch=[--cpus-per-task=4]"))
    assert options["cpus-per-task"] == "4"
    assert "exclusive" not in options
    assert "partition" not in options


@pytest.mark.parametrize(
    "override", ["stack.slurm.sbatch=[high]", 'stack.slurm.sbatch=["--partition=a\\nrm -rf /"]']
)
def test_script_when_a_value_is_no_argument_then_one_line_says_so(
    tmp_path: Path, override: str
) -> None:
    with pytest.raises(ConfigError, match=r"stack\.slurm"):
        script_of(tmp_path, override)


@pytest.mark.parametrize(
    ("gpus", "of_the_job", "seen"),
    [
        ("0,1", {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, "4,5"),
        ("2,3", {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, "6,7"),
        ("2,3", {}, "2,3"),
        ("", {"CUDA_VISIBLE_DEVICES": "4,5"}, ""),
    ],
)
def test_step_when_the_trainer_has_two_nodes_then_each_gets_its_rank_and_gpus(
    tmp_path: Path, gpus: str, of_the_job: dict[str, str], seen: str
) -> None:
    spec = ProcessSpec(
        "trainer",
        ("python", "-m", "areal_trainer"),
        tmp_path / "log",
        environment={"CUDA_VISIBLE_DEVICES": gpus},
        nodes=(Node("n0", "10.0.0.1"), Node("n1", "10.0.0.2")),
    )
    argv = step_argv(spec)
    assert argv[0] == "srun"
    assert "--nodelist=n0,n1" in argv
    assert argv[argv.index("--ntasks") + 1] == "2"
    assert {"--overlap", "--kill-on-bad-exit=1", "--job-name=trainer"} <= set(argv)
    after = argv[argv.index("/bin/sh") :]
    shown = subprocess.run(
        [
            *after[: after.index("python")],
            "sh",
            "-c",
            'echo "$PET_NODE_RANK $CUDA_VISIBLE_DEVICES"',
        ],
        env={"SLURM_PROCID": "1", "PATH": "/usr/bin:/bin", **of_the_job},
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout == f"1 {seen}\n"


async def test_place_when_opened_then_this_node_goes_first(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = path / "scontrol"
    node.write_text(
        '#!/bin/sh\nif [ "$2" = hostnames ]; then printf "n1\\nn2\\n"; else\n'
        "echo 'NodeName=n1 Arch=x86_64 NodeAddr=10.0.0.1 NodeHostName=n1'\n"
        "echo 'NodeName=n2 Arch=x86_64 NodeAddr=10.0.0.2 NodeHostName=n2'\nfi\n"
    )
    node.chmod(0o755)
    environment = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURMD_NODENAME": "n2",
    }
    assert in_allocation(environment)
    cluster = SlurmCluster(environment)
    config = build_config(GRPOConfig, None, ["allocation_mode=sglang:d2+fsdp:d1"])
    placement = await cluster.open(config)
    assert placement.control == "10.0.0.2"
    assert placement.bind == "0.0.0.0"
    assert [node.name for node in placement.inference] == ["n2", "n1"]
    assert cluster.describe() == {"slurm_job": "7"}


def test_submit_when_there_is_a_token_in_the_environment_then_slurm_does_not_get_it(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sbatch = Program(path, "sbatch", "812;cluster\n")
    monkeypatch.setenv("AREAL_TOKEN", "0123456789abcdef-secret")
    assert submit(tmp_path / "job.sh") == "812"
    assert sbatch.calls == [f"--parsable --chdir={Path.cwd()} {tmp_path}/job.sh"]
    assert "0123456789abcdef-secret" not in (path / "sbatch.env").read_text()


def test_submit_when_slurm_refuses_then_its_words_are_the_error(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = os.environ["PATH"]
    monkeypatch.setenv("PATH", str(path))
    with pytest.raises(NotFound, match="no program 'sbatch' on PATH"):
        submit(tmp_path / "job.sh")
    monkeypatch.setenv("PATH", before)
    Program(path, "sbatch", error="sbatch: error: invalid partition specified: h100\n")
    with pytest.raises(ArealError, match="invalid partition specified: h100"):
        submit(tmp_path / "job.sh")


@pytest.mark.parametrize(
    ("answer", "error", "state", "reason", "active"),
    [
        ("PENDING|Resources\n", "", "PENDING", "Resources", True),
        ("RUNNING|None\n", "", "RUNNING", "", True),
        ("TIMEOUT|TimeLimit\n", "", "TIMEOUT", "TimeLimit", False),
        ("", "", "GONE", "", False),
        ("", "slurm_load_jobs error: Invalid job id specified\n", "GONE", "", False),
    ],
)
def test_state_when_asked_then_slurms_word_and_reason(
    path: Path, answer: str, error: str, state: str, reason: str, active: bool
) -> None:
    Program(path, "squeue", answer, error)
    found = job_state("7")
    assert (found.state, found.reason, found.active) == (state, reason, active)


def test_end_when_gently_then_only_the_script_is_signalled(path: Path) -> None:
    scancel = Program(path, "scancel")
    end_job("7", gently=True)
    end_job("7", gently=False)
    assert scancel.calls == ["--batch --signal=TERM 7", "7"]
