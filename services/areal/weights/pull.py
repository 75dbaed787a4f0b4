"""Pulling a version from a weight store into a folder: for engines that load folders only."""

from __future__ import annotations

import mmap
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from areal.chassis.logging import get_logger
from areal.errors import InvalidInput
from areal.weights.delta import FILE
from areal.weights.manifest import (
    SINGLE_FILE,
    PolicyVersion,
    WeightFile,
    at_path,
    parse_version_dir,
    version_name,
    write_manifest,
)
from areal.weights.publisher import TransportError, in_threads
from areal.weights.rebuild import rebuild
from areal.weights.safetensors import file_digest
from areal.weights.store_client import CHUNK_BYTES, StoreConnection

TIMEOUT_S = 60.0
"""Each wait on the store's socket."""
_LANES = 2
_PREFIX = "/versions/"


def split_location(location: str) -> tuple[str, str]:
    """(store's url, version's name) of http://host:port/versions/NAME; raises InvalidInput."""
    url, _, name = location.partition(_PREFIX)
    if parse_version_dir(name) is None:
        raise InvalidInput(f"{location[:200]!r}: expected http://host:port/versions/NAME")
    return url, name


def pull_version(
    location: str, headers: Mapping[str, str], root: Path, *, keep: int = 2
) -> PolicyVersion:
    """Brings a version below `root`, complete and checked, unless it is there; blocking.

    Args:
        location: http://host:port/versions/NAME.
        headers: The bearer token.
        root: Best a memory-backed folder; older versions in it are deleted.
        keep: How many stay, this one included.

    Raises:
        InvalidInput: What came is not what the manifest says; names file and digest.
        TransportError: The store is away or refuses, or `root` is full.
    """
    url, name = split_location(location)
    final, staging = root / name, root / f".pull-{name}"
    with StoreConnection(url, headers, TIMEOUT_S) as store:
        manifest = store.manifest(name)
    if final.is_dir():
        return at_path(manifest, final)
    try:
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        _make_room(root, name, keep)
        made = _pull_delta(url, manifest, headers, root, staging)
        for file in manifest.files:
            if Path(file.name).name != file.name:
                raise InvalidInput(f"{location}: file name {file.name!r}")
            if not (made and file.name == SINGLE_FILE):
                pull_file(url, name, headers, file, staging / file.name)
        write_manifest(manifest, staging)
        staging.rename(final)
    except OSError as error:
        shutil.rmtree(staging, ignore_errors=True)
        raise TransportError(f"{root}: {error.strerror or error}") from None
    except Exception:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    return at_path(manifest, final)


def pull_file(
    url: str, name: str, headers: Mapping[str, str], file: WeightFile, target: Path
) -> None:
    """Brings one file of a version; raises InvalidInput when its digest is another one."""
    with target.open("w+b") as stream:
        if not file.size_bytes:
            return
        os.posix_fallocate(stream.fileno(), 0, file.size_bytes)  # a full folder says so now
        with mmap.mmap(stream.fileno(), file.size_bytes) as mapped, memoryview(mapped) as view:

            def lane(number: int) -> None:
                with StoreConnection(url, headers, TIMEOUT_S) as store:
                    step = _LANES * CHUNK_BYTES
                    for start in range(number * CHUNK_BYTES, file.size_bytes, step):
                        with view[start : start + CHUNK_BYTES] as part:
                            store.read_into(name, file.name, start, part)

            in_threads(lane, range(_LANES))
    _check(url, name, file, target)


def _pull_delta(
    url: str, manifest: PolicyVersion, headers: Mapping[str, str], root: Path, staging: Path
) -> bool:
    """Makes the weights of the version before, where that is here; False: pull them whole."""
    delta = manifest.delta
    if delta is None or parse_version_dir(delta.base) is None or not (root / delta.base).is_dir():
        return False
    name = version_name(manifest.version, manifest.incarnation)
    try:
        pull_file(
            url, name, headers, WeightFile(FILE, delta.size_bytes, delta.digest), staging / FILE
        )
        rebuild(staging, root / delta.base, delta)
        for file in manifest.files:
            if file.name == SINGLE_FILE:
                _check(url, name, file, staging / SINGLE_FILE)
    except (InvalidInput, TransportError) as error:
        get_logger("areal.weights.pull").warning("delta_unusable", cause=str(error))
        (staging / FILE).unlink(missing_ok=True)
        return False
    return True


def _check(url: str, name: str, file: WeightFile, target: Path) -> None:
    digest = file_digest(target)
    if digest != file.digest:
        raise InvalidInput(
            f"{url}: {name}/{file.name}: digest {digest[:16]}…, expected {file.digest[:16]}…"
        )


def _make_room(root: Path, name: str, keep: int) -> None:
    """Deletes all but the newest versions, and what a killed puller left."""
    here = sorted(f for f in root.iterdir() if parse_version_dir(f.name) and f.name != name)
    for folder in here[: max(0, len(here) - (keep - 1))]:
        shutil.rmtree(folder, ignore_errors=True)
    for folder in root.glob(".pull-*"):
        if folder.name != f".pull-{name}":
            shutil.rmtree(folder, ignore_errors=True)
