"""Slurm: the job that is submitted, and what the launcher inside it does differently.

    login node                                       first node of the job
    areal run --on slurm ── sbatch ── job.sh ──> areal run --on slurm ── srun ──> servers, ranks
        └── follows stack.json and the endpoints <──────┘

Inside an allocation (a job, or `salloc`) `areal run --on slurm` runs the trial on its nodes: stores
and services beside it, each inference server and the trainer as a step. Outside it submits itself.
"""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from areal.addresses import everywhere
from areal.config.experiment import BaseExperimentConfig
from areal.errors import ArealError, ConfigError
from areal.security import without_secrets
from areal_launch.clusters.base import (
    Cluster,
    Placement,
    assign,
    count_nodes,
    refuse_sharing,
)
from areal_launch.gpus.visible import VARIABLE
from areal_launch.processes.commands import run_command
from areal_launch.processes.process import Child, Node, ProcessSpec

# Before the time limit: for the step in progress, a checkpoint and the end of everything.
END_NOTICE_S = 60

QUEUED = frozenset({"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SUSPENDED"})
ACTIVE = QUEUED | {"RUNNING", "COMPLETING", "STAGE_OUT", "SIGNALING"}


def in_allocation(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process runs in a Slurm allocation."""
    return "SLURM_JOB_ID" in environment


def render_script(config: BaseExperimentConfig, folder: Path, experiment: Path) -> str:
    """Returns the job script: it runs the same command inside the allocation.

    Args:
        config: Valid; says which nodes.
        folder: Where the job's output goes; absolute.
        experiment: The resolved experiment file; absolute.
    """
    refuse_sharing(config, "Slurm")
    slurm, counts = config.stack.slurm, count_nodes(config)
    options = {
        "job-name": f"areal-{config.experiment_name}-{config.trial_name}",
        "output": str(folder / "slurm-%j.out"),
        "open-mode": "append",
        "nodes": str(counts.nodes),
        "ntasks-per-node": "1",
        # To the script alone, which ends the steps in order.
        "signal": f"B:TERM@{END_NOTICE_S}",
        "gpus-per-node": str(config.stack.gpus_per_node or ""),
    }
    arguments = [f"--{key}={value}" for key, value in options.items() if value]
    if not any(argument.startswith(("--cpus-per-task", "-c")) for argument in slurm.sbatch):
        arguments += ["--exclusive", "--mem=0"]
    for argument in slurm.sbatch:
        if not argument.startswith("-"):
            raise ConfigError(f"stack.slurm.sbatch {argument!r}: expected an argument like --qos=x")
    arguments += slurm.sbatch
    if broken := [argument for argument in arguments if re.search(r"[\n\r]", argument)]:
        raise ConfigError(f"stack.slurm {broken[0]!r}: expected one line")
    command = shlex.join(
        [
            *(sys.executable, "-m", "areal_launch.cli", "run", config.recipe),
            # What may change was asked before the job was submitted.
            *("--config", str(experiment), "--on", "slurm", "--accept-changes"),
        ]
    )
    source = str(Path(__file__).resolve().parents[2])
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH {argument}" for argument in arguments),
            f"export PYTHONPATH={shlex.quote(source)}${{PYTHONPATH:+:$PYTHONPATH}}",
            *([slurm.setup.rstrip()] if slurm.setup else []),
            f"exec {command}",
            "",
        ]
    )


def submit(script: Path) -> str:
    """Hands the script to sbatch; returns the job's number."""
    # Secrets go by files in the run folder: Slurm writes a job's environment down.
    answer = _run(
        ["sbatch", "--parsable", f"--chdir={Path.cwd()}", str(script)],
        environment=without_secrets(os.environ),
    )
    job = answer.strip().partition(";")[0]
    if not job.isdigit():
        raise ArealError(f"sbatch: expected a job number, got {answer.strip()[:200]!r}")
    return job


@dataclass(frozen=True)
class JobState:
    """What Slurm says about a job."""

    state: str
    """PENDING, RUNNING, COMPLETED, ...; GONE if Slurm no longer knows it."""
    reason: str = ""

    @property
    def active(self) -> bool:
        """Whether the job will run, runs, or is being ended."""
        return self.state in ACTIVE


def job_state(job: str) -> JobState:
    """Asks Slurm once for the state of a job."""
    command = ["squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T|%r"]
    try:
        answer = _run(command).strip()
    except ArealError as error:
        if "Invalid job id" in str(error):
            return JobState("GONE")
        raise
    state, _, reason = answer.partition("|")
    return JobState(state or "GONE", "" if reason == "None" else reason)


def end_job(job: str, *, gently: bool) -> None:
    """Ends a job: `gently` asks its script to end everything, otherwise Slurm does, at once."""
    how = ["--batch", "--signal=TERM"] if gently else []
    _run(["scancel", *how, job])


def _run(argv: list[str], environment: Mapping[str, str] | None = None) -> str:
    return run_command(argv, "is this a node of a Slurm cluster?", environment=environment)


class SlurmCluster(Cluster):
    """The nodes of the allocation that this process runs in."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        """`environment` has the variables, including those that Slurm has set."""
        self._job = environment["SLURM_JOB_ID"]
        self._list = environment.get("SLURM_JOB_NODELIST", "")
        self._here = environment.get("SLURMD_NODENAME", "")

    async def open(self, config: BaseExperimentConfig) -> Placement:
        """Names of nodes as Slurm knows them become addresses; this one goes first."""
        refuse_sharing(config, "Slurm")
        names = (
            await asyncio.to_thread(_run, ["scontrol", "show", "hostnames", self._list])
        ).split()
        names.sort(key=lambda name: name != self._here)  # stable
        addresses = await asyncio.to_thread(_addresses, names)
        return assign(
            config, [Node(name, addresses.get(name, name)) for name in names], everywhere()
        )

    async def spawn(self, spec: ProcessSpec, stack_id: str) -> Child:
        """Starts a step on the spec's nodes, or a child process if it has none."""
        if not spec.nodes:
            return await Child.start(spec, stack_id)
        return await SlurmChild.start(replace(spec, argv=step_argv(spec)), stack_id)

    def describe(self) -> dict[str, Any]:
        return {"slurm_job": self._job}


def step_argv(spec: ProcessSpec) -> tuple[str, ...]:
    """Returns the srun command that starts a process on each of its nodes."""
    count = str(len(spec.nodes))
    pairs = [f"{key}={value}" for key, value in spec.environment.items() if key != VARIABLE]
    script = f'export PET_NODE_RANK="$SLURM_PROCID"; {_own_gpus(spec)}exec "$@"'
    return (
        *("srun", f"--job-name={spec.name}", "--overlap", "--nodes", count, "--ntasks", count),
        *("--ntasks-per-node=1", f"--nodelist={','.join(node.name for node in spec.nodes)}"),
        *("--mem=0", "--cpu-bind=none", "--mpi=none", "--input=none", "--kill-on-bad-exit=1"),
        *("/bin/sh", "-c", script, "sh"),
        *(("env", *pairs) if pairs else ()),
        *spec.argv,
    )


def _own_gpus(spec: ProcessSpec) -> str:
    """Returns shell code with which a step's process sees only its own GPUs of its node.

    Those that Slurm shows to a step are all of the job there, which need not begin with 0.
    """
    own = spec.environment.get(VARIABLE)
    if not own:
        return "" if own is None else f"export {VARIABLE}=; "
    fields = ",".join(str(int(index) + 1) for index in own.split(","))
    all_of_them = ",".join(map(str, range(max(map(int, own.split(","))) + 1)))
    return f'export {VARIABLE}="$(echo "${{{VARIABLE}:-{all_of_them}}}" | cut -d , -f {fields})"; '


def _addresses(names: list[str]) -> dict[str, str]:
    shown = _run(["scontrol", "--oneliner", "show", "node", ",".join(names)])
    found = {}
    for line in shown.splitlines():
        name = re.search(r"\bNodeName=(\S+)", line)
        address = re.search(r"\bNodeAddr=(\S+)", line)
        if name and address:
            found[name[1]] = address[1]
    return found


class SlurmChild(Child):
    """The srun of a step; what it leaves on the nodes when it is killed is ended with it."""

    async def sweep(self) -> None:
        """Ends the step too, where srun could not any more."""
        await super().sweep()
        if await self.wait() < 0:
            await asyncio.to_thread(_end_steps, os.environ["SLURM_JOB_ID"], self._spec.name)


def _end_steps(job: str, name: str) -> None:
    listed = _run(["squeue", "--steps", "--noheader", f"--jobs={job}", "--format=%i|%j"])
    for line in listed.splitlines():
        step, _, step_name = line.strip().partition("|")
        if step_name == name:
            _run(["scancel", "--signal=KILL", step])
