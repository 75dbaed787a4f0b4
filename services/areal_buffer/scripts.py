"""The Lua scripts: generated tables, the prelude, the script's own lines as `main`, main.lua."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import redis.asyncio as redis
from redis.exceptions import (
    BusyLoadingError,
    ClusterDownError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from areal import errors
from areal.chassis.waits import Waits
from areal_buffer.config import BufferConfig
from areal_buffer.states import transitions_as_lua

# What Redis answers while it cannot write, or not yet: no live replica, a disk that takes no
# snapshot, a script of somebody else. In a transaction the client puts the command before it.
_FOR_NOW = re.compile(r"(?:^|caused error: \(['\"])(?:NOREPLICAS|MISCONF|BUSY|MASTERDOWN|LOADING) ")
_AWAY = (
    RedisConnectionError,
    RedisTimeoutError,
    BusyLoadingError,
    ReadOnlyError,
    ClusterDownError,  # and of a replica: its primary is down
    TryAgainError,
)
_PARTS = {"take": ("take_named.lua", "take.lua")} | {
    name: ("memory.lua", f"{name}.lua")
    for name in ("submit", "complete", "return", "sweep", "open", "session")
}
NAMES = (
    "submit",
    "lease",
    "renew",
    "complete",
    "read",
    "reject",
    "return",
    "cancel",
    "ended",
    "register",
    "take",
    "confirm",
    "fetch",
    "discarded",
    "commit",
    "sweep",
    "retry",
    "drop",
    "stats",
    "open",
    "session",
    "put_recipe",
)


@dataclass(frozen=True)
class Script:
    """A script's text and the digest that EVALSHA wants."""

    text: str
    sha: str


def load_scripts(config: BufferConfig) -> dict[str, Script]:
    """Returns all scripts by name, with this run's limits written into them."""
    folder = files("areal_buffer") / "lua"
    head = f"local ALLOWED = {transitions_as_lua()}\nlocal CONFIG = {config.as_lua()}\n" + (
        folder / "prelude.lua"
    ).read_text("utf-8")
    tail = (folder / "main.lua").read_text("utf-8")
    scripts = {}
    for name in NAMES:
        parts = _PARTS.get(name, (f"{name}.lua",))
        body = "".join((folder / part).read_text("utf-8") for part in parts)
        text = f"{head}\nlocal function main()\n{body}\nend\n{tail}"
        scripts[name] = Script(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())
    return scripts


Argument = str | int | bytes


class Scripts:
    """Runs them in Redis; raises what a script refused with, or Unavailable while Redis is away."""

    def __init__(
        self, client: redis.Redis, config: BufferConfig, prefix: str, waits: Waits
    ) -> None:
        self._redis = client
        self._prefix = prefix
        self._waits = waits
        self._scripts = load_scripts(config)

    async def run(self, name: str, *args: Argument) -> Any:
        """Runs one script atomically; returns its reply."""
        script = self._scripts[name]
        try:
            with self._waits.on("answer", "redis", name):
                try:
                    return await self._redis.evalsha(script.sha, 1, self._prefix, *args)
                except NoScriptError:
                    return await self._redis.eval(script.text, 1, self._prefix, *args)
        except RedisError as error:
            raise translate(error) from None

    async def run_with(self, name: str, payloads: Sequence[bytes], *args: Argument) -> Any:
        """Runs a script whose large payloads are in keys of their own; it renames or deletes these.

        They need not pass through Lua, which would copy each twice. One transaction: no one else
        sees these keys, so that they can have the same names each time.
        """
        script = self._scripts[name]
        staged = {f"{self._prefix}staged:{at}": each for at, each in enumerate(payloads)}
        if not staged:
            return []
        keys = (self._prefix, *staged)

        async def attempt() -> Any:
            async with self._redis.pipeline(transaction=True) as pipe:
                pipe.mset(staged)
                pipe.evalsha(script.sha, len(keys), *keys, *args)
                return (await pipe.execute(raise_on_error=False))[1]

        try:
            with self._waits.on("answer", "redis", name):
                reply = await attempt()
                if isinstance(reply, NoScriptError):
                    await self._redis.script_load(script.text)
                    reply = await attempt()
                if isinstance(reply, RedisError):
                    raise reply
                return reply
        except RedisError as error:
            raise translate(error) from None


def translate(error: RedisError) -> errors.ArealError:
    """Returns the error that a script refused with, or the nearest class to Redis's own error."""
    # A pipeline quotes the command, with the trajectory in it, before what Redis said.
    _, quoted, said = str(error).rpartition(" of pipeline caused error: ")
    text = said.strip("()',\"") if quoted else said
    if isinstance(error, ResponseError) and text.startswith("AREAL "):
        _, kind, message = text.split(" ", 2)
        message = message.split(" script: ", 1)[0]
        return errors.restore(kind, message)
    if isinstance(error, OutOfMemoryError) or text.startswith("OOM"):
        # It may be short of memory for a while only, e.g. when it rewrites its file.
        return errors.CapacityExceeded(f"Redis is out of memory: {text}; try again in 5 s")
    if isinstance(error, _AWAY):
        return errors.Unavailable(f"Redis does not answer: {text}")
    if _FOR_NOW.search(text):
        return errors.Unavailable(f"Redis refuses commands for now: {text}")
    return errors.ArealError(f"Redis: {text}")
