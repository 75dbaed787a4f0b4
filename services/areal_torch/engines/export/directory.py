"""Writing a Hugging Face directory: weights in shards, configs, and what servers read beside."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from areal.model_directory import read_config
from areal.weights.publisher import companions

_INDEX = "model.safetensors.index.json"
# Written from the model that was trained.
_OWN = ("config.json", "generation_config.json")
_NAMED_TEMPLATES = "additional_chat_templates"
_SHARD_BYTES = 4 << 30
_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")


def write_directory(
    directory: Path, tensors: Iterable[tuple[str, Tensor]], hf: Any, source: Path
) -> None:
    """Writes a Hugging Face directory: weights, configs, files of tokenizers and processors.

    Weights of an earlier model in the directory are removed.

    Args:
        directory: Created if missing.
        tensors: (name, CPU tensor), from `iter_full_tensors`; held in memory one shard at a time.
        hf: The model, for its configs.
        source: Directory that files of tokenizers and processors are copied from.
    """
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    shards: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    size = total = 0
    sizes: dict[torch.dtype, int] = {}

    def flush() -> None:
        nonlocal size
        if pending:
            part = directory / f"part-{len(shards):05d}.safetensors"
            save_file(pending, part, metadata={"format": "pt"})
            shards.append(list(pending))
            pending.clear()
            size = 0

    for name, tensor in tensors:
        if pending and size + tensor.nbytes > _SHARD_BYTES:
            flush()
        pending[name] = tensor.contiguous()
        size += tensor.nbytes
        total += tensor.nbytes
        if tensor.is_floating_point():
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.nbytes
    flush()
    weight_map = {}
    for number, names in enumerate(shards):
        final = (
            "model.safetensors"
            if len(shards) == 1
            else f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        )
        (directory / f"part-{number:05d}.safetensors").rename(directory / final)
        weight_map.update(dict.fromkeys(names, final))
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / _INDEX).write_text(json.dumps(index, indent=2) + "\n", "utf-8")
    _remove_others(directory, set(weight_map.values()))
    dtype = str(max(sizes, key=lambda each: sizes[each])) if sizes else None
    config = _config(hf, source, dtype and dtype.removeprefix("torch."))
    (directory / "config.json").write_text(
        json.dumps(config, indent=2, sort_keys=True) + "\n", "utf-8"
    )
    if getattr(hf, "generation_config", None) is not None:
        hf.generation_config.save_pretrained(directory)
    _copy_companions(source, directory)


def _config(hf: Any, source: Path, dtype: str | None) -> dict[str, Any]:
    """Returns the content of config.json: the source's, with what the model has otherwise.

    transformers renames and drops fields when it reads a config (the layers' pattern of Nemotron-H,
    say), and servers may know only the published form.

    Args:
        hf: The model.
        source: The directory that its config was read from.
        dtype: Of most weights, as config.json names it.
    """
    config: dict[str, Any] = hf.config.to_dict()
    if (source / "config.json").is_file():
        read = type(hf.config).from_pretrained(source).to_dict()
        config = _with_changes(read_config(source), read, config)
    config["architectures"] = [type(hf).__name__]
    if dtype is not None:  # some tensors may stay in float32 (`precision`)
        for part in (config, config.get("text_config")):
            if isinstance(part, dict):
                part["dtype"] = dtype
                if "torch_dtype" in part:  # its former name
                    part["torch_dtype"] = dtype
    return config


def _with_changes(
    written: dict[str, Any], read: dict[str, Any], now: dict[str, Any]
) -> dict[str, Any]:
    """Returns `written` with each field that differs between `read` and `now`."""
    merged = dict(written)
    for name, value in now.items():
        before: Any = read.get(name)
        part: Any = written.get(name)
        if name in read and value == before:
            continue
        if name in ("dtype", "_name_or_path"):  # the caller's; a path of this machine
            continue
        merged[name] = value
        nested = all(isinstance(each, dict) for each in (part, before, value))
        if nested and before.keys() == value.keys():
            merged[name] = _with_changes(part, before, value)
    return merged


def _copy_companions(source: Path, directory: Path) -> None:
    if source.resolve() == directory.resolve():
        return
    for file in companions(source):
        if file.name not in _OWN:
            shutil.copyfile(file, directory / file.name)
    if (source / _NAMED_TEMPLATES).is_dir():
        shutil.copytree(source / _NAMED_TEMPLATES, directory / _NAMED_TEMPLATES, dirs_exist_ok=True)


def _remove_others(directory: Path, written: set[str]) -> None:
    """Removes the weights of an earlier model: readers would disagree on which one it is."""
    if len(written) == 1:
        (directory / _INDEX).unlink(missing_ok=True)
    for file in directory.glob("model*.safetensors"):
        if _WEIGHTS.fullmatch(file.name) and file.name not in written:
            file.unlink()
