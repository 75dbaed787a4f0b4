"""`sglang_facts.py WHEEL`: writes what SGLang asks of a machine.

    pip download --no-deps sglang==0.5.23 && python tools/sglang_facts.py sglang-*.whl

The file is requirements/sglang-gpu.json. Tests hold the lock of torch for GPUs, docs/gpu.md and the
Dockerfile against it.
"""

from __future__ import annotations

import email
import json
import re
import sys
import zipfile
from pathlib import Path

FACTS = Path(__file__).resolve().parents[1] / "requirements" / "sglang-gpu.json"
_PINNED = ("torch", "transformers", "tokenizers")
# They compile kernels when a server starts.
_COMPILING = ("apache-tvm-ffi", "flashinfer-python", "ninja", "tilelang")


def facts(wheel: Path) -> dict[str, object]:
    """Returns versions that the wheel pins, the CUDA release it is for, and what compiles."""
    with zipfile.ZipFile(wheel) as archive:
        [name] = [each for each in archive.namelist() if each.endswith(".dist-info/METADATA")]
        metadata = email.message_from_bytes(archive.read(name))
    requires = metadata.get_all("Requires-Dist", [])
    plain = [each for each in requires if "extra ==" not in each]
    pins = dict(re.findall(r"^([\w-]+)==([\w.]+)$", "\n".join(plain), re.MULTILINE))
    names = {re.split(r"[^\w-]", each)[0].lower().replace("_", "-") for each in plain}
    [platform] = set(re.findall(r"manylinux_(\d+_\d+)", wheel.name))
    return {
        "sglang": metadata["Version"],
        "python": metadata["Requires-Python"],
        "glibc": platform.replace("_", "."),
        **{name: pins[name] for name in _PINNED},
        "cuda": sorted({int(each) for each in re.findall(r"\[cu(\d+)\]", "\n".join(plain))}),
        "compiles": [name for name in _COMPILING if name in names],
    }


if __name__ == "__main__":
    FACTS.write_text(json.dumps(facts(Path(sys.argv[1])), indent=2) + "\n")
