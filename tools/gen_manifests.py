"""Writes manifests/rendered/ from the chart, and the chart's copy of its example: `make manifests`.

For people without helm, and as the chart's golden output. They name a Secret, `areal-auth`, which
manifests/prerequisites.yaml says how to make: a generated token cannot be checked in.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CHART = ROOT / "charts" / "areal"
EXAMPLE = ("arithmetic_grpo.py", "arithmetic_grpo.yaml")
# Name of a rendered file to the values it is made of.
RENDERED = {
    "cpu-demo": "cpu-demo-values.yaml",
    "single-gpu-node": "single-gpu-node-values.yaml",
    "multi-node": "gpu-values.yaml",
}


def find_helm() -> str:
    """The helm of `make setup`, else the one on PATH."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    found = shutil.which("helm", path=path)
    if found is None:
        sys.exit("helm is not there: `make setup` brings it on Linux x86-64, else install helm 3")
    return found


def render(values: str) -> str:
    """One release named areal in a namespace of the same name."""
    command = [find_helm(), "template", "areal", str(CHART), "--namespace", "areal", "--skip-tests"]
    command += ["--values", str(CHART / "ci" / values), "--set", "auth.existingSecret=areal-auth"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return f"# Rendered from charts/areal with ci/{values} by `make manifests`; do not edit.\n" + (
        done.stdout
    )


def main() -> None:
    for name in EXAMPLE:  # a chart can only read files of its own folder
        shutil.copyfile(ROOT / "examples" / name, CHART / "files" / name)
    folder = ROOT / "manifests" / "rendered"
    folder.mkdir(parents=True, exist_ok=True)
    for name, values in RENDERED.items():
        (folder / f"{name}.yaml").write_text(render(values))


if __name__ == "__main__":
    main()
