"""Reads the config of a Hugging Face model directory. No torch here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal.errors import InvalidInput

_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")
"""What families call the number of a layer's experts."""


def read_model_config(directory: Path) -> dict[str, Any]:
    """Like `read_config`; for a model with several parts (text and vision), the text part's."""
    config = read_config(directory)
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, dict) else config


def read_config(directory: Path) -> dict[str, Any]:
    """Returns the content of config.json.

    Raises:
        InvalidInput: The file is missing, or is not a JSON object.
    """
    file = directory / "config.json"
    if file.exists() and not file.is_file():  # a FIFO would be waited for
        raise InvalidInput(f"{str(file)!r}: expected a file")
    try:
        config = json.loads(file.read_text("utf-8"))
    except OSError as error:
        raise InvalidInput(f"model {str(directory)!r}: {file.name}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{str(file)!r}: not JSON: {error}") from None
    if not isinstance(config, dict):
        raise InvalidInput(f"{str(file)!r}: expected a JSON object")
    return config


def refuse_quantized(directory: Path) -> None:
    """Refuses a model whose weights are not plain floating-point numbers, by its config.json.

    Raises:
        InvalidInput: It has a `quantization_config`, or it cannot be read.
    """
    config = read_config(directory)
    key = "quantization_config"
    for part in (config, config.get("text_config")):
        if not isinstance(part, dict) or part.get(key) is None:
            continue
        found = part[key]
        method = found.get("quant_method") if isinstance(found, dict) else found
        raise InvalidInput(
            f"{str(directory / 'config.json')!r}: {key}: quant_method {method!r:.100}: expected a "
            "bfloat16 copy of the model, whose config.json has no such key"
        )


def serving_dtype(requested: str, directory: Path, *, gpu: bool) -> str:
    """Returns the precision of inference servers and of the weights published to them.

    Args:
        requested: `model.dtype`; any value but `auto` is used as it is.
        directory: The model's folder; one that a recipe will create counts as float32, the dtype in
            which an engine saves.
        gpu: True if servers have GPUs; then it is 16 bits, like the trainer's precision on GPUs.

    Returns:
        `float32` or `bfloat16`; for `auto` on CPUs that of the checkpoint (bfloat16 for float16).

    Raises:
        InvalidInput: config.json cannot be read.
    """
    if requested != "auto":
        return requested
    if gpu:
        return "bfloat16"
    if not (directory / "config.json").is_file():
        return "float32"
    config = read_model_config(directory)
    stored = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    return "bfloat16" if stored.removeprefix("torch.") in ("bfloat16", "float16") else "float32"


@dataclass(frozen=True)
class RouteShape:
    """How many routes a token of a mixture of experts has."""

    layers: int
    chosen: int
    """Experts of a token in a layer."""
    experts: int
    """Experts of a layer."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> RouteShape | None:
        """Reads a model's config.json (its text part); None: it is no mixture of experts."""
        experts = next((config[name] for name in _EXPERTS if config.get(name)), None)
        found = (config.get("num_hidden_layers"), config.get("num_experts_per_tok"), experts)
        whole = [each for each in found if isinstance(each, int) and not isinstance(each, bool)]
        if len(whole) != len(found) or min(whole) < 1 or whole[2] > 1 << 15:
            return None
        return cls(*whole)

    @classmethod
    def of_folder(cls, directory: Path) -> RouteShape | None:
        """Reads a model's folder; None also where config.json cannot be read."""
        try:
            return cls.of(read_model_config(directory))
        except InvalidInput:
            return None


def rope_of(config: Mapping[str, Any]) -> Any:
    """Returns what config.json says of rotary positions: `rope_parameters`, or `rope_scaling`.

    Raises:
        InvalidInput: Both are there and differ. transformers 5 takes `rope_scaling` and forgets the
            base (`rope_theta`) of `rope_parameters`; others do the reverse.
    """
    new, earlier = config.get("rope_parameters"), config.get("rope_scaling")
    if isinstance(new, Mapping) and isinstance(earlier, Mapping) and new and earlier:
        ours, theirs = (
            {"rope_type" if key == "type" else key: value for key, value in part.items()}
            for part in (new, {"rope_theta": config.get("rope_theta"), **earlier})
        )
        if any(theirs.get(key) != value for key, value in ours.items()):
            raise InvalidInput(
                f"rope_parameters={dict(new)!r:.200} and rope_scaling={dict(earlier)!r:.200} "
                "differ: expected only one of them"
            )
    return earlier or new
