"""Generates services/areal/v1 from proto/ (run by `make proto`)."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import grpc_tools
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTO = ROOT / "proto"
OUT = ROOT / "services"


def main() -> int:
    """Regenerates everything; stale files go."""
    target = OUT / "areal" / "v1"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    # The stub generators live beside the interpreter, which need not be on PATH.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    files = sorted(str(p.relative_to(PROTO)) for p in PROTO.rglob("*.proto"))
    well_known = Path(grpc_tools.__file__).parent / "_proto"
    status = protoc.main(
        [
            "protoc",
            f"-I{PROTO}",
            f"-I{well_known}",
            f"--python_out={OUT}",
            f"--grpc_python_out={OUT}",
            f"--mypy_out=quiet:{OUT}",
            f"--mypy_grpc_out=quiet:{OUT}",
            *files,
        ]
    )
    (target / "__init__.py").write_text(
        '"""GENERATED from proto/areal/v1 by tools/gen_proto.py; do not edit."""\n'
    )
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
