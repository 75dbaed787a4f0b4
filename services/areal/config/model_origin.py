"""Resolves `model.path` to a folder; a model elsewhere is fetched into one first. No torch here.

models/qwen                        a folder, even if there is none: fetched models go below models/
./lab/tiny                         a folder
Qwen/Qwen2.5-0.5B[@revision]       from the Hub, unless there is a folder Qwen; refused if a recipe
                                   may create its model, or the folder may be on a cluster
hf://Qwen/Qwen2.5-0.5B[@revision]  the Hub's
s3://bucket/models/qwen            from an object store, also gs:// and az://
"""

from __future__ import annotations

import re
from pathlib import Path

from areal.config.transports import in_object_store
from areal.errors import ConfigError

HUB = "hf://"
_FETCHED = Path("models")
_RUNS = Path("runs")  # the default of `run_root`: what recipes create for a run is there
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[^\s@]+)?")


def find_model(path: str, *, made: bool) -> tuple[Path, str]:
    """Returns a model's folder and the address to fetch it from ("" if it needs no fetching).

    Args:
        path: `model.path`.
        made: True if a missing folder may be created, by the recipe or elsewhere.

    Raises:
        ConfigError: With `made`, `org/name` may be a model on the Hub or a folder to create.

    Example:
        >>> find_model("Qwen/Qwen2.5-0.5B@main", made=False)
        (PosixPath('models/Qwen--Qwen2.5-0.5B@main'), 'hf://Qwen/Qwen2.5-0.5B@main')
    """
    name = path.removeprefix(HUB)
    if _HUB_NAME.fullmatch(name) and not (path == name and _has_place(Path(path))):
        if made and path == name:
            raise ConfigError(
                f"model.path {path!r}: a model on the Hub, or a folder to create? "
                f"expected {HUB}{path} or ./{path}"
            )
        return _FETCHED / name.replace("/", "--"), f"{HUB}{name}"
    if in_object_store(path):
        return _FETCHED / path.partition("://")[2].strip("/").replace("/", "--"), path
    return Path(path), ""


def _has_place(folder: Path) -> bool:
    """Whether the folder may be here already, or be created next to others."""
    return folder.parent in (_FETCHED, _RUNS) or folder.parent.exists()
