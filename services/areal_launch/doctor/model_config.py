"""The config.json of a model that is still to be downloaded: a few KB, from which sizes follow."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

from areal.config.model_origin import HUB

_ANSWER_S = 20.0


def fetch_config(source: str, into: Path) -> bool:
    """Puts a Hub model's config.json into a folder; False if that is impossible or takes too long.

    `HF_TOKEN`, `HF_ENDPOINT` and proxies are read from the environment by huggingface_hub.

    Args:
        source: From `find_model`; only `hf://org/name[@revision]` is fetched.
        into: An existing folder.
    """
    if not source.startswith(HUB):
        return False
    found: list[Path] = []
    # A thread that is left behind: the library tries again for longer than a doctor should wait.
    thread = threading.Thread(target=_fetch, args=(source, into, found), daemon=True)
    thread.start()
    thread.join(_ANSWER_S)
    if not found:
        return False
    shutil.copy(found[0], into / "config.json")
    return True


def _fetch(source: str, into: Path, found: list[Path]) -> None:
    try:
        from huggingface_hub import hf_hub_download

        name, _, revision = source.removeprefix(HUB).partition("@")
        file = hf_hub_download(
            name,
            "config.json",
            revision=revision or None,
            local_dir=into / "hub",
            etag_timeout=_ANSWER_S / 2,
        )
    except Exception:  # the library's and its transport's: no network, no such model, no library
        return
    found.append(Path(file))
