"""Writes requirements/*.txt: every package that images and `make setup` install, with its hashes.

`make lock` keeps the versions that are there as far as pyproject.toml lets it; `ARGS=--upgrade`
takes the newest. One resolution for all files, by uv, from PyPI alone and for every platform. A
file has what the files below it lack, so nothing is in an image twice.

torch is apart. torch-cuda.txt has PyPI's build, which is for CUDA, and NVIDIA's libraries. Nothing
but people writes torch-cpu.txt: the CPU build is not on PyPI (tools/install_torch.py).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from tools.image_requirements import split

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "requirements"
PYPI = "https://pypi.org/simple"
# What torch needs, but for the CUDA libraries: those come with the builds that want them.
OF_TORCH = ("filelock", "fsspec", "jinja2", "networkx", "sympy", "typing-extensions")
_CONTROL = ("build.txt", "control.txt")
_EVERYTHING = (*_CONTROL, "reward.txt", "weight-sync.txt", "inference.txt", "trainer.txt")
# On what each file is installed; a file comes after those below it.
BELOW: dict[str, tuple[str, ...]] = {
    "build.txt": (),
    "control.txt": ("build.txt",),
    "stores.txt": _CONTROL,
    "reward.txt": _CONTROL,
    "weight-sync.txt": _CONTROL,
    "inference.txt": _CONTROL,
    "trainer.txt": (*_CONTROL, "inference.txt"),
    "dev.txt": _EVERYTHING,
    "ray.txt": (*_EVERYTHING, "dev.txt"),
    "environments.txt": (*_EVERYTHING, "dev.txt"),
    "trackers.txt": (*_EVERYTHING, "dev.txt"),
    "lock.txt": (),
    "torch-cuda.txt": (*_CONTROL, "inference.txt"),
}
# botocore, that moto's S3 server needs, excludes the python-dateutil that kubernetes asks for; all
# it calls is `tz` and `parser`, which both have.
# peft and accelerate ask for torch, which is apart. trackio excludes the pillow of the trainer's
# image, from which it only saves images.
OVERRIDES = "pillow>=13\npython-dateutil>=3.0.0\ntorch ; python_version < '3'\n"
CUDA = "torch-cuda.txt"
"""The one lock that has torch, with the CUDA libraries that it asks for."""
_BESIDE = ("ray", "environments")
"""Extras with a lock file of their own, which `make setup` does not install."""
_TRACKERS = ("mlflow", "trackio", "wandb")
"""Extras that share a lock file, which `make setup` does not install."""
HEADER = "# Written by `make lock` from pyproject.toml.\n"


def wanted(pyproject: dict[str, Any]) -> dict[str, list[str]]:
    """File name to the requirements it must meet; torch is replaced by what torch needs."""
    project = pyproject["project"]
    files = {
        "build.txt": pyproject["build-system"]["requires"],
        **split(project),
        **{f"{name}.txt": project["optional-dependencies"][name] for name in _BESIDE},
        "trackers.txt": [r for name in _TRACKERS for r in project["optional-dependencies"][name]],
        "lock.txt": pyproject["dependency-groups"]["lock"],
        CUDA: project["optional-dependencies"]["cuda"],
    }
    files["inference.txt"] = [
        *(each for each in files["inference.txt"] if not each.startswith("torch=")),
        *OF_TORCH,
    ]
    return files


def names(lock: Path) -> set[str]:
    """The packages in a lock file."""
    return set(re.findall(r"^([a-z0-9][a-z0-9-]*)==", lock.read_text(), re.MULTILINE))


def compile_to(lock: Path, requirements: list[str], *options: str) -> None:
    """Lets uv resolve; what the file already has is preferred."""
    command = ["uv", "pip", "compile", "--quiet", "--no-config", "--default-index", PYPI]
    command += ["--universal", "--python-version", "3.11", "--generate-hashes"]
    command += ["--no-emit-index-url", "--no-annotate", "--no-header"]
    # Settings of this machine's pip and uv must not show in the result.
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("UV_", "PIP_"))}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment.get('PATH', '')}"
    subprocess.run(
        [*command, *options, "--output-file", str(lock), "-"],
        input="\n".join(requirements),
        text=True,
        check=True,
        env=environment,
        stdout=subprocess.DEVNULL,
    )


def main(options: list[str]) -> None:
    files = wanted(tomllib.loads((ROOT / "pyproject.toml").read_text()))
    with tempfile.TemporaryDirectory() as scratch:
        overrides = Path(scratch) / "overrides.txt"
        overrides.write_text(OVERRIDES)
        options = [*options, "--overrides", str(overrides)]
        everything = Path(scratch) / "everything.txt"
        earlier = [FOLDER / f for f in files if f != CUDA and (FOLDER / f).is_file()]
        everything.write_text("".join(lock.read_text() for lock in earlier))
        together = [each for name, part in files.items() if name != CUDA for each in part]
        compile_to(everything, together, *options)
        for file, requirements in files.items():
            below = sorted(set().union(*(names(FOLDER / each) for each in BELOW[file])))
            left_out = [part for name in below for part in ("--no-emit-package", name)]
            lock = Path(scratch) / file
            with_torch = () if file == CUDA else options[-2:]
            if file == CUDA and (FOLDER / file).is_file():
                lock.write_text((FOLDER / file).read_text())  # keeps its versions
            compile_to(lock, requirements, "--constraints", str(everything), *with_torch, *left_out)
            (FOLDER / file).write_text(HEADER + lock.read_text())


if __name__ == "__main__":
    main(sys.argv[1:])
