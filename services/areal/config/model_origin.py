"""Resolves `model.path` to a folder; a model elsewhere is fetched into one first. No torch here.

models/qwen                        a folder, even if there is none: fetched models go below models/
./lab/tiny                         a folder
Qwen/Qwen2.5-0.5B[@revision]       from the Hub, unless there is a folder Qwen
hf://Qwen/Qwen2.5-0.5B[@revision]  the Hub's
s3://bucket/models/qwen            from an object store, also gs:// and az://
"""

from __future__ import annotations

import re
from pathlib import Path

from areal.config.services import in_object_store

HUB = "hf://"
_FETCHED = Path("models")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[^\s@]+)?")


def find_model(path: str, *, made: bool) -> tuple[Path, str]:
    """Returns a model's folder and the address to fetch it from ("" if it needs no fetching).

    Args:
        path: `model.path`.
        made: True if a missing folder will be created; then `org/name` means a folder.

    Example:
        >>> find_model("Qwen/Qwen2.5-0.5B@main", made=False)
        (PosixPath('models/Qwen--Qwen2.5-0.5B@main'), 'hf://Qwen/Qwen2.5-0.5B@main')
    """
    name = path.removeprefix(HUB)
    named = _HUB_NAME.fullmatch(name) is not None
    folder = made or Path(path).parent == _FETCHED or Path(path).parent.exists()
    if named and (path != name or not folder):
        return _FETCHED / name.replace("/", "--"), f"{HUB}{name}"
    if in_object_store(path):
        return _FETCHED / path.partition("://")[2].strip("/").replace("/", "--"), path
    return Path(path), ""
