"""`areal doctor --gpu`: tries what a run on GPUs does first; each row has a deadline.

| row           | tries                                                             | where        |
|---------------|-------------------------------------------------------------------|--------------|
| cuda, trainer | CUDA starts                                                       | this Python  |
| cuda, servers | CUDA starts                                                       | the servers' |
| train step    | eight tokens forward and backward, with the kernel that is chosen | this Python  |
| nccl pair     | a collective between two ranks                                    | this Python  |
| sglang        | `import sglang`                                                   | the servers' |
| compiler      | nvcc, g++, ninja for torch's CUDA: SGLang builds kernels at start | the servers' |
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from areal.config.experiment import BaseExperimentConfig
from areal.errors import ArealError
from areal_launch.doctor.findings import Check, Finding, examine, missing, note, ok, unknown
from areal_launch.doctor.gpus import judge, look, why_no_cuda
from areal_launch.gpus.engine import (
    CPU,
    Installed,
    inference_command,
    missing_engine,
    sglang_installed,
    sglang_python,
)
from areal_launch.gpus.probe import probe
from areal_launch.gpus.visible import MIG, VARIABLE, lent
from areal_launch.processes.process import CHILD_ENVIRONMENT, python_environment

ROW_S = 60.0
"""Deadline of one row; on an idle machine a row takes 5 to 20 s."""
_TOOLKIT = "install the CUDA toolkit, g++ and ninja, or serve from SGLang's image (docs/gpu.md)"


def try_on_gpus(config: BaseExperimentConfig, model: Path | None) -> list[Finding]:
    """Tries GPUs, environments and compiler.

    Args:
        config: Valid. With `stack.gpus_per_node=0`, all GPUs are tried.
        model: A folder with the model's config.json; None: a tiny model is tried.
    """
    python = _servers_python(config)
    first: dict[str, Check] = {
        "cuda, trainer": partial(_cuda, sys.executable),
        "cuda, servers": partial(_servers, config, python, partial(_cuda, python)),
        "sglang": partial(_servers, config, python, partial(_import_sglang, python)),
        "compiler": partial(_compiler, config, python or str(sglang_python())),
    }
    with ThreadPoolExecutor(len(first)) as pool:  # each mostly waits for a process to import torch
        rows = list(pool.map(lambda item: examine(dict([item]))[0], first.items()))
    names = _assigned(config) if rows[0].verdict == "ok" else ()
    second: dict[str, Check] = {
        "train step": partial(_train_step, names, model),
        "nccl pair": partial(_pair, names),
    }
    return [rows[0], rows[1], *examine(second), *rows[2:]]


def _assigned(config: BaseExperimentConfig) -> tuple[str, ...]:
    """The stack's GPUs, or all that are here."""
    try:
        machine = look(config)
        judged = judge(config, machine)
        if judged.trainer:
            return tuple(dict.fromkeys(judged.trainer + judged.servers))  # `|`: the same ones
    except ArealError:
        pass
    found = probe(sys.executable)
    return lent(os.environ, len(found.devices))


def _servers_python(config: BaseExperimentConfig) -> str:
    """The interpreter of the servers' environment; "" if it is not known, or not whole."""
    if not config.stack.inference_command.strip():
        return str(sglang_python()) if sglang_installed() is Installed.WHOLE else ""
    command = inference_command(config)
    return command[0] if command and Path(command[0]).name.startswith("python") else ""


def _not_needed(config: BaseExperimentConfig) -> str:
    """Returns why the servers' environment does not matter; "" if it does."""
    if config.stack.inference_command.strip() == CPU:
        return f"not needed: stack.inference_command={CPU}"
    if config.offline or config.endpoints.inference:
        return "not needed: the stack starts no servers"
    return ""


def _servers(config: BaseExperimentConfig, python: str, check: Check) -> Finding:
    """Returns the trials for the servers' environment, if the stack has one."""
    if why := _not_needed(config):
        return ok(why)
    if python:
        return check()
    if command := config.stack.inference_command.strip():
        return unknown(f"stack.inference_command {command!r} does not begin with a Python")
    problem, fix = missing_engine(sglang_installed())
    return missing(problem, fix)


def _cuda(python: str) -> Finding:
    found = probe(python)
    if (why := why_no_cuda(found)) is not None:
        return missing(f"{found}: {why[0]}", why[1])
    names = ", ".join(each.name for each in found.devices)
    return ok(f"{found}: {names}")


def _train_step(names: Sequence[str], model: Path | None) -> Finding:
    if not names:
        return unknown("not tried: CUDA does not start", "see the row `cuda, trainer`")
    command = [sys.executable, "-m", "areal_trainer.gpu_trial", "step"]
    answer = _run([*command, *([str(model)] if model else [])], {VARIABLE: names[0]})
    if isinstance(answer, Finding):
        return answer
    which = "one layer of the model" if model else "a tiny model"
    return ok(
        f"{which}, forward and backward: {answer['kernel']} attention in {answer['dtype']} on "
        f"{answer['device']}, {answer['seconds']:.0f} s"
    )


def _pair(names: Sequence[str]) -> Finding:
    if not names:
        return unknown("not tried: CUDA does not start", "see the row `cuda, trainer`")
    if len(names) < 2 or names[0].startswith(MIG):
        return ok("not needed: there is one GPU")
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("-m", "areal_trainer.gpu_trial", "pair"),
    ]
    answer = _run(command, {VARIABLE: ",".join(names[:2])})
    if isinstance(answer, Finding):
        return answer
    return ok(f"{answer['ranks']} ranks with NCCL {answer['nccl']}")


def _import_sglang(python: str) -> Finding:
    code = "import json, sglang; print(json.dumps({'version': sglang.__version__}))"
    answer = _run([python, "-c", code], {})
    return answer if isinstance(answer, Finding) else ok(f"{answer['version']} in {python}")


def _compiler(config: BaseExperimentConfig, python: str) -> Finding:
    """Finds the compilers with which SGLang builds kernels: on PATH, or in the toolkit."""
    if why := _not_needed(config):
        return ok(why)
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    beside = Path(python).parent
    packaged = sorted(beside.parent.glob("lib*/python*/site-packages/nvidia/*/bin"))
    folders = [os.environ.get("PATH", ""), str(beside), f"{home}/bin", *map(str, packaged)]
    path = os.pathsep.join(folders)
    tools = {name: shutil.which(name, path=path) for name in ("nvcc", "g++", "ninja")}
    if absent := [name for name, found in tools.items() if not found]:
        return note(f"no {', '.join(absent)}: SGLang may build kernels at its start", _TOOLKIT)
    built, toolkit = probe(python).build, _toolkit(str(tools["nvcc"]))
    if toolkit and built.startswith("CUDA ") and _major(toolkit) != _major(built):
        found = f"{tools['nvcc']} is of {toolkit}, and the servers' torch is built for {built}"
        return note(f"{found}: kernels that SGLang builds may not load", _TOOLKIT)
    found = ", ".join(str(each) for each in tools.values())
    return ok(f"{found}; {toolkit}" if toolkit else found)


def _toolkit(nvcc: str) -> str:
    """Returns the toolkit's version as torch names builds (`CUDA 13.0`); "" if it is not said."""
    with suppress(OSError, subprocess.SubprocessError):
        said = subprocess.run(  # noqa: S603 - found on the path that a build would use
            [nvcc, "--version"], capture_output=True, timeout=ROW_S, check=False
        ).stdout
        if release := re.search(rb"release (\d+\.\d+)", said):
            return f"CUDA {release[1].decode()}"
    return ""


def _major(cuda: str) -> str:
    return cuda.partition(".")[0]


def _run(command: Sequence[str], extra: Mapping[str, str]) -> dict[str, Any] | Finding:
    """Returns the JSON in the last line of a process's output, or why there is none."""
    environment = {**python_environment(), **CHILD_ENVIRONMENT, **extra}
    with subprocess.Popen(  # noqa: S603 - our own modules, or the servers' Python
        list(command),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
        env=environment,
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=ROW_S)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # torchrun's ranks, too
            _, err = process.communicate()
            return missing(f"no answer within {ROW_S:.0f} s: {_last(err)}")
    answers = [line for line in out.splitlines() if line.startswith("{")]
    if process.returncode or not answers:
        return missing(_last(err) or f"exit code {process.returncode}")
    answer: dict[str, Any] = json.loads(answers[-1])
    return missing(answer["refused"]) if "refused" in answer else answer


def _last(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""
