"""The kit's `contact` with torch's flash attention, which has the signature of a release.

    python attention.py 2.11        # in the kit's folder; a line of JSON for each try

A GPU is pretended as far as the choice of a kernel goes: tensors and the kernel are on the CPU.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

KIT, REPOSITORY = Path.cwd(), Path(__file__).resolve().parents[3]


def main(release: str) -> None:
    """Compares each family with float64, in two modes."""
    sys.path[1:1] = [str(KIT / "services"), str(KIT)]
    sys.path.append(str(REPOSITORY))  # of it, only tests
    import torch.nn.attention.varlen as torch_varlen
    from tests.unit.areal_torch.engines.model.attention import flash_on_cpu
    from tools.gpu import plan
    from tools.gpu.cases import contact

    from areal_torch.engines.model.attention import dispatch

    calls = 0

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        return stub(*args, **options)

    stub = {"2.11": flash_on_cpu.varlen_2_11, "2.14": flash_on_cpu.varlen_2_13}[release]
    counted.__wrapped__ = stub  # type: ignore[attr-defined]  # whose signature is read
    torch_varlen.varlen_attn = counted
    dispatch._missing = lambda kernel, device, compute: None
    for setting in plan.find("contact").settings:
        if setting.get("kernel") == "varlen" and setting["recompute"] in ("none", "selective"):
            calls = 0
            found = contact.measure(setting | {"dtype": "float32"}, miniature=False)
            print(json.dumps({**setting, **found, "calls": calls}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
