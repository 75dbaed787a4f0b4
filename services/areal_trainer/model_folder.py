"""Whether a model's folder is whole, and when it is ready. No torch here.

`MODEL.ready`, beside the folder, says that version 0 will not change any more: everything that
reads the model waits for it. It holds where the model came from; "" for a recipe or a person.
"""

from __future__ import annotations

import json
from pathlib import Path

from areal.chassis.files import replacing
from areal.errors import InvalidInput
from areal.weights.manifest import SINGLE_FILE, weight_files

INDEX = "model.safetensors.index.json"


def ready_file(model: Path) -> Path:
    """Returns a file next to the folder, so that replacing the folder cannot bring it along."""
    return model.with_name(f"{model.name}.ready")


def ready_from(model: Path) -> str | None:
    """Returns where a model that is ready came from; None if it is not ready."""
    file = ready_file(model)
    if not (file.is_file() and (model / "config.json").is_file()):
        return None
    return (file.read_text("utf-8").splitlines() or [""])[0]


def mark_ready(model: Path, source: str) -> None:
    """Marks the model as ready for others to read."""
    with replacing(ready_file(model)) as half:
        half.write_text(f"{source}\n", "utf-8")


def lacks(model: Path) -> str:
    """Returns what a copied or fetched model still lacks; "" if nothing.

    Args:
        model: Its folder.

    Returns:
        E.g. "no config.json", or "model-00002-of-00004.safetensors: 3 of 5 GB".
    """
    lost = [each for each in sorted(model.glob("*")) if each.is_symlink() and not each.exists()]
    if lost:
        return f"{lost[0].name} is a broken link: copy files, not links"
    if not (model / "config.json").is_file():
        return "no config.json"
    for file in sorted(model.glob("*.json")):
        try:
            json.loads(file.read_text("utf-8"))
        except (ValueError, OSError):  # ValueError: not UTF-8, or not JSON
            return f"{file.name} is not JSON, or is incomplete"
    if problem := _weights_lack(model):
        return problem
    if not (model / "tokenizer.json").is_file():
        return "no tokenizer.json"
    return ""


def size_of(folder: Path) -> int:
    """Returns the bytes of all files in it, half-written ones too; they may vanish meanwhile."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:
            continue
    return total


def _weights_lack(model: Path) -> str:
    if (model / INDEX).is_file() and (model / SINGLE_FILE).is_file():
        try:
            weight_files(model)
        except InvalidInput as error:
            return str(error)
    elif (model / INDEX).is_file():
        shards = sorted(set(json.loads((model / INDEX).read_text("utf-8"))["weight_map"].values()))
        absent = [name for name in shards if not (model / name).is_file()]
        if absent:
            return f"no {absent[0]} ({len(shards) - len(absent)} of {len(shards)} files)"
    elif not [*model.glob("*.safetensors"), *model.glob("*.bin")]:
        return "no weights: neither *.safetensors nor *.bin"
    problems = (_shortened(file) for file in sorted(model.glob("*.safetensors")))
    return next(filter(None, problems), "")


def _shortened(file: Path) -> str:
    """Returns why a safetensors file is not whole: its header says how long it is."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or size < 8 + length:
            return f"{file.name}: incomplete"
        try:
            header = json.loads(stream.read(length))
        except ValueError:
            return f"{file.name}: not a safetensors file"
    ends = [each["data_offsets"][1] for name, each in header.items() if name != "__metadata__"]
    whole = 8 + length + max(ends, default=0)
    return f"{file.name}: {size:,} of {whole:,} bytes" if size != whole else ""
