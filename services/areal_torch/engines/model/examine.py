"""Tests whether a model can be trained: `python -m areal_torch.engines.model.examine DIRECTORY`.

Prints one JSON object: what the self-test measured, or `{"refused": "why, in one line"}`. A process
of its own, since the command line imports no torch.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from areal.errors import ArealError
from areal_torch.engines.model.packed import PackedCausalLM
from areal_torch.engines.model.self_test import self_test
from areal_torch.engines.model.source import load_model


def examine(directory: Path) -> dict[str, Any]:
    """Loads a model as a trainer does, on the CPU in float32, and tests it.

    Args:
        directory: Has config.json; without weights the test uses random ones.
    """
    from_scratch = not any(directory.glob("*.safetensors"))
    dtype = torch.float32
    try:
        hf = load_model(str(directory), dtype, from_scratch=from_scratch, seed=0)
        model = PackedCausalLM(hf, kernel="packed", chunk_elements=1 << 26)
        found = asdict(self_test(model, torch.device("cpu"), dtype))
    except ArealError as error:
        return {"refused": str(error)}
    return {**found, "random_weights": from_scratch}


if __name__ == "__main__":
    print(json.dumps(examine(Path(sys.argv[1]))))  # noqa: T201
