"""The config.json of a model that is still to be downloaded: a few KB, from which sizes follow."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from areal.config.model_origin import HUB

_ANSWER_S = 20.0
# In a process of its own: the library tries again, and says so, for longer than a doctor waits.
_FETCH = """
import sys
from huggingface_hub import hf_hub_download
name, revision, folder = sys.argv[1:]
hf_hub_download(name, "config.json", revision=revision or None, local_dir=folder)
"""


def fetch_config(source: str, into: Path) -> bool:
    """Puts a Hub model's config.json into a folder; False if that is impossible or takes too long.

    `HF_TOKEN`, `HF_ENDPOINT` and proxies are read from the environment by huggingface_hub.

    Args:
        source: From `find_model`; only `hf://org/name[@revision]` is fetched.
        into: An existing folder.
    """
    if not source.startswith(HUB):
        return False
    name, _, revision = source.removeprefix(HUB).partition("@")
    try:
        subprocess.run(  # noqa: S603 - our own lines
            [sys.executable, "-c", _FETCH, name, revision, str(into)],
            capture_output=True,
            timeout=_ANSWER_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False
    return (into / "config.json").is_file()
