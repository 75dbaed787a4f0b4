"""A version that is an adapter: only the LoRA matrices are published, and servers add them.

    version 0:  W, the model as it was configured; never changes
    version v:  W + alpha / rank * B A of its own A and B

    v00000012-inc3/{adapter_model.safetensors, adapter_config.json, manifest.json}

The folder is what `peft.PeftModel.from_pretrained` and SGLang's /load_lora_adapter read. Each
version has a name of its own, the folder's, and a request is computed with the one that it names:
see decision 30. No torch here.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from areal.errors import InvalidInput
from areal.weights.manifest import (
    ADAPTER_CONFIG,
    ADAPTER_FILE,
    AdapterInfo,
    PolicyVersion,
    WeightFile,
    WeightTensor,
    check_same_tensors,
)
from areal.weights.safetensors import digest_of

PREFIX = "base_model.model."
"""The prefix that peft puts before a module's own name."""
_TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")


def split_name(name: str) -> tuple[str, str]:
    """Returns (module, "A" or "B") of an adapter's tensor.

    Example:
        >>> split_name("base_model.model.model.layers.0.mlp.up_proj.lora_A.weight")
        ('model.layers.0.mlp.up_proj', 'A')

    Raises:
        InvalidInput: It is not one: a module that is trained whole, for example.
    """
    match = _TENSOR.fullmatch(name)
    if match is None:
        raise InvalidInput(
            f"adapter tensor {name[:200]!r}: expected {PREFIX}MODULE.lora_A.weight or lora_B.weight"
        )
    return match[1], match[2]


def adapter_config(info: AdapterInfo, names: Iterable[str]) -> bytes:
    """Returns the content of adapter_config.json.

    Args:
        info: Rank and alpha.
        names: The tensors'.
    """
    modules = sorted({split_name(name)[0].rpartition(".")[2] for name in names})
    return json.dumps(
        {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": "",
            "r": info.rank,
            "lora_alpha": info.alpha,
            "lora_dropout": 0.0,
            "bias": "none",
            "target_modules": modules,
            "fan_in_fan_out": False,
            "inference_mode": True,
        },
        indent=2,
    ).encode()


def assemble_adapter(
    folder: Path,
    version: int,
    incarnation: int,
    weights: WeightFile,
    tensors: Sequence[WeightTensor],
    info: AdapterInfo,
) -> PolicyVersion:
    """Returns the manifest of an adapter whose safetensors file is already described."""
    config = adapter_config(info, [tensor.name for tensor in tensors])
    return PolicyVersion(
        version=version,
        incarnation=incarnation,
        path=str(folder),
        files=(WeightFile(ADAPTER_CONFIG, len(config), digest_of(config)), weights),
        tensors=tuple(sorted(tensors, key=lambda tensor: tensor.name)),
        publish_time=time.time(),
        adapter=info,
    )


def check_against(manifest: PolicyVersion, base: PolicyVersion) -> None:
    """Checks that servers which hold version 0 can serve a version.

    Raises:
        InvalidInput: Whole weights: see `check_same_tensors`. An adapter: it was made for other
            weights, lacks a file or a matrix, or has one that no tensor of version 0 has room for.
    """
    info = manifest.adapter
    if info is None:
        check_same_tensors(manifest, base)
        return
    label = f"version {manifest.version}: adapter"
    if info.rank < 1 or info.alpha < 1:
        raise InvalidInput(
            f"{label} of rank {info.rank} and alpha {info.alpha}: expected 1 or more"
        )
    if not (0 <= info.size < math.inf and 0 <= info.change < math.inf):
        raise InvalidInput(
            f"{label}: size {info.size}, change {info.change}: expected finite numbers, 0 or more"
        )
    if info.base_digest and base.digest and info.base_digest != base.digest:
        raise InvalidInput(
            f"{label} for weights with digest {info.base_digest[:16]}…, but version 0 has "
            f"{base.digest[:16]}…: model.path was changed since the run began"
        )
    if manifest.files and {f.name for f in manifest.files} != {ADAPTER_CONFIG, ADAPTER_FILE}:
        raise InvalidInput(
            f"{label} with files {sorted(f.name for f in manifest.files)}: expected "
            f"{ADAPTER_CONFIG} and {ADAPTER_FILE}"
        )
    pairs = paired({tensor.name: tensor.shape for tensor in manifest.tensors}, label)
    shapes = {tensor.name: tensor.shape for tensor in base.tensors}
    for module, (down, up) in pairs.items():
        whole = shapes.get(f"{module}.weight")
        if whole is None:
            raise InvalidInput(f"{label} for {module}: version 0 has no tensor {module}.weight")
        if (*up[:1], *down[1:]) != whole or (down[0], up[1]) != (info.rank, info.rank):
            raise InvalidInput(
                f"{label} for {module}: A {list(down)} and B {list(up)}: expected rank "
                f"{info.rank} for a matrix {list(whole)}"
            )


def paired(
    shapes: Mapping[str, tuple[int, ...]], label: str
) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Returns the shapes of A [rank, in] and B [out, rank] by module.

    Raises:
        InvalidInput: A tensor is no matrix of an adapter, or one of the two is missing.
    """
    found: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        module, side = split_name(name)
        if len(shape) != 2:
            raise InvalidInput(f"{label}: tensor {name} has shape {list(shape)}: expected a matrix")
        found.setdefault(module, {})[side] = shape
    if not found:
        raise InvalidInput(f"{label}: no tensors")
    for module, sides in found.items():
        if len(sides) != 2:
            raise InvalidInput(f"{label} for {module}: expected both lora_A and lora_B")
    return {module: (sides["A"], sides["B"]) for module, sides in found.items()}
