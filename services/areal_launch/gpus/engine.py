"""Which engine the inference servers run: SGLang, a command of the user's, or the CPU engine.

The CPU engine serves where there are no GPUs, and where it is named: it never replaces an SGLang
that was expected.
"""

from __future__ import annotations

import shlex
import sys
from enum import StrEnum
from pathlib import Path

from areal.config.experiment import BaseExperimentConfig
from areal.errors import CannotStart, ConfigError

CPU = "cpu"
"""The value of `stack.inference_command` that selects the CPU engine."""
SGLANG = ".venv-sglang-gpu"
"""SGLang as `make sglang-gpu` installs it, beside the environment in which this command runs."""
_STAMP = ".set-up"
"""The file that make writes when everything is installed."""


class Installed(StrEnum):
    """How much of SGLang's environment is there."""

    ABSENT = "absent"
    HALF = "half"
    WHOLE = "whole"


def sglang_environment() -> Path:
    """Returns the folder in which SGLang's environment is expected."""
    return Path(sys.prefix).parent / SGLANG


def sglang_python() -> Path:
    """Returns the interpreter of that environment, which need not exist."""
    return sglang_environment() / "bin" / "python"


def sglang_installed() -> Installed:
    """Returns whether SGLang is installed there; a download that was interrupted is half of it."""
    folder = sglang_environment()
    if not folder.exists():
        return Installed.ABSENT
    package = any(folder.glob("lib*/python*/site-packages/sglang/__init__.py"))
    whole = package and sglang_python().exists() and (folder / _STAMP).exists()
    return Installed.WHOLE if whole else Installed.HALF


def uses_cpu_engine(config: BaseExperimentConfig) -> bool:
    """Whether the servers that a stack starts are CPU engines."""
    command = config.stack.inference_command.strip()
    return command == CPU or not (command or config.stack.gpus_per_node)


def missing_engine(sglang: Installed) -> tuple[str, str]:
    """Returns why there is no SGLang for servers, and what to do; ("", "") when it is there."""
    if sglang is Installed.WHOLE:
        return "", ""
    state, again = "not installed", ""
    if sglang is Installed.HALF:
        state, again = "only half installed", " again"
    return (
        f"SGLang is {state} in {sglang_environment()}",
        f"run `make sglang-gpu`{again}, or set stack.inference_command='PYTHON -m "
        f"sglang.launch_server' for an SGLang of yours, or stack.inference_command={CPU} for the "
        "CPU engine",
    )


def inference_command(config: BaseExperimentConfig) -> list[str]:
    """Returns the command that starts a server; empty for our CPU engine.

    Raises:
        CannotStart: The servers have GPUs, and SGLang is not installed, or only half.
        ConfigError: `stack.inference_command` is no command.
    """
    if uses_cpu_engine(config):
        return []
    command = config.stack.inference_command
    if not command.strip():
        problem, fix = missing_engine(sglang_installed())
        if problem:
            raise CannotStart(f"stack.gpus_per_node {config.stack.gpus_per_node}: {problem}; {fix}")
        return [str(sglang_python()), "-m", "sglang.launch_server"]
    try:
        return shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"stack.inference_command {command!r}: {error}") from None
