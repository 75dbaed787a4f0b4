"""The Lua scripts: generated tables, the prelude, then the script's own lines."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib.resources import files

from areal_buffer.config import LedgerConfig
from areal_buffer.states import transitions_as_lua

_PARTS = {"take": ("take_named.lua", "take.lua")}
NAMES = (
    "submit",
    "lease",
    "renew",
    "complete",
    "reject",
    "return_task",
    "cancel",
    "ended",
    "register",
    "take",
    "fetch",
    "commit",
    "sweep",
    "retry",
    "drop",
    "stats",
)


@dataclass(frozen=True)
class Script:
    """A script's text and the digest that EVALSHA wants."""

    text: str
    sha: str


def load_scripts(config: LedgerConfig) -> dict[str, Script]:
    """All scripts by name, with this run's limits written into them."""
    folder = files("areal_buffer") / "lua"
    head = (
        f"local ALLOWED = {transitions_as_lua()}\n"
        f"local CONFIG = {config.as_lua()}\n" + (folder / "prelude.lua").read_text()
    )
    scripts = {}
    for name in NAMES:
        parts = _PARTS.get(name, (f"{name}.lua",))
        text = "\n".join([head, *((folder / part).read_text() for part in parts)])
        scripts[name] = Script(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())
    return scripts
