"""NCCL of the trainer and of the servers: a process group needs one version on both sides.

NCCL compares the versions of all ranks exactly when they connect, and refuses any other.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from areal.config.experiment import BaseExperimentConfig
from areal_launch.gpus.engine import inference_command

_PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")


@dataclass(frozen=True)
class Nccl:
    """Versions of the packages that torch loads NCCL from; empty: none is installed there.

    A torch may bring NCCL in another way, so an empty version means that it is not known.
    """

    trainer: str
    servers: str


def installed_nccl(config: BaseExperimentConfig) -> Nccl:
    """Looks into this Python's environment and into that of the engine.

    Args:
        config: Valid.
    """
    python = Path((inference_command(config) or [sys.executable])[0])
    servers = python.parent.parent.glob("lib/python*/site-packages")
    return Nccl(_version_in(Path(each) for each in sys.path if each), _version_in(servers))


def _version_in(folders: Iterable[Path]) -> str:
    path = [str(each) for each in folders]
    found = (each for name in _PACKAGES for each in metadata.distributions(name=name, path=path))
    return next((each.version for each in found), "")
