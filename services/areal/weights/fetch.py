"""Downloads versions from a store into folders, for engines that load only folders.

    python -m areal.weights.fetch http://weight-sync:8500/versions/v00000000-inc0 /model

fetches the model and tokenizer with which an engine starts; it is for servers without a volume.
"""

from __future__ import annotations

import argparse
import mmap
import os
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from areal.chassis.logging import configure_logging, get_logger
from areal.errors import ArealError, InvalidInput
from areal.security import Security
from areal.weights.delta import FILE, rebuild
from areal.weights.manifest import (
    SINGLE_FILE,
    PolicyVersion,
    WeightFile,
    at_path,
    parse_version_dir,
    write_manifest,
)
from areal.weights.objects import open_remote
from areal.weights.publisher import TransportError, in_threads
from areal.weights.safetensors import file_digest
from areal.weights.store_client import CHUNK_BYTES

_LANES = 2
_TRY_AGAIN_S = 1.0


def fetch_model(location: str, headers: Mapping[str, str], folder: Path) -> int:
    """Writes everything that an engine reads into a folder; blocking.

    Args:
        location: As for `open_remote`.
        headers: The bearer token.
        folder: Created if missing.

    Returns:
        The number of files.

    Raises:
        InvalidInput: The data differ from what the store announced.
        TransportError: The store does not answer or refuses, or `folder` cannot be written.
    """
    store, name = open_remote(location, headers)
    with store:
        files = {file.name: file for file in store.companions(name)}
        files |= {file.name: file for file in store.manifest(name).files}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file in files.values():
            if Path(file.name).name != file.name:
                raise InvalidInput(
                    f"{location}: file {file.name!r}: expected a name without folders"
                )
            fetch_file(location, headers, file, folder / file.name)
    except OSError as error:
        raise TransportError(f"{folder}: {error.strerror or error}") from None
    return len(files)


def fetch_version(
    location: str, headers: Mapping[str, str], root: Path, *, keep: int = 2
) -> PolicyVersion:
    """Downloads a version below `root`, complete and checked, unless it exists; blocking.

    Args:
        location: As for `open_remote`.
        headers: The bearer token.
        root: Ideally a memory-backed folder; older versions in it are deleted.
        keep: Number of versions to keep, including this one.

    Raises:
        InvalidInput: The data differ from the manifest; the message names file and digest.
        TransportError: The store does not answer or refuses, or `root` is full.
    """
    store, name = open_remote(location, headers)
    final, staging = root / name, root / f".fetch-{name}"
    with store:
        manifest = store.manifest(name)
    if final.is_dir():
        return at_path(manifest, final)
    try:
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        _make_room(root, name, keep)
        made = _fetch_delta(location, manifest, headers, root, staging)
        for file in manifest.files:
            if Path(file.name).name != file.name:
                raise InvalidInput(
                    f"{location}: file {file.name!r}: expected a name without folders"
                )
            if not (made and file.name == SINGLE_FILE):
                fetch_file(location, headers, file, staging / file.name)
        write_manifest(manifest, staging)
        staging.rename(final)
    except OSError as error:
        shutil.rmtree(staging, ignore_errors=True)
        raise TransportError(f"{root}: {error.strerror or error}") from None
    except Exception:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    return at_path(manifest, final)


def fetch_file(location: str, headers: Mapping[str, str], file: WeightFile, target: Path) -> None:
    """Downloads one file of a version; raises InvalidInput if its digest differs."""
    with target.open("w+b") as stream:
        if not file.size_bytes:
            return
        os.posix_fallocate(stream.fileno(), 0, file.size_bytes)  # a full folder says so now
        with mmap.mmap(stream.fileno(), file.size_bytes) as mapped, memoryview(mapped) as view:

            def lane(number: int) -> None:
                store, name = open_remote(location, headers)
                with store:
                    step = _LANES * CHUNK_BYTES
                    for start in range(number * CHUNK_BYTES, file.size_bytes, step):
                        with view[start : start + CHUNK_BYTES] as part:
                            store.read_into(name, file.name, start, part)

            in_threads(lane, range(_LANES))
    _check(location, file, target)


def _fetch_delta(
    location: str, manifest: PolicyVersion, headers: Mapping[str, str], root: Path, staging: Path
) -> bool:
    """Makes the weights of the version before, where that is here; False: pull them whole."""
    delta = manifest.delta
    if delta is None or parse_version_dir(delta.base) is None or not (root / delta.base).is_dir():
        return False
    try:
        fetch_file(
            location, headers, WeightFile(FILE, delta.size_bytes, delta.digest), staging / FILE
        )
        rebuild(staging, root / delta.base, delta)
        for file in manifest.files:
            if file.name == SINGLE_FILE:
                _check(location, file, staging / SINGLE_FILE)
    except (InvalidInput, TransportError) as error:
        get_logger(__name__).warning("delta_unusable", cause=str(error))
        (staging / FILE).unlink(missing_ok=True)
        return False
    return True


def _check(location: str, file: WeightFile, target: Path) -> None:
    digest = file_digest(target)
    if digest != file.digest:
        raise InvalidInput(
            f"{location}/{file.name}: digest {digest[:16]}…, expected {file.digest[:16]}…"
        )


def _make_room(root: Path, name: str, keep: int) -> None:
    """Deletes all but the newest versions, and what a killed fetch left."""
    here = sorted(f for f in root.iterdir() if parse_version_dir(f.name) and f.name != name)
    for folder in here[: max(0, len(here) - (keep - 1))]:
        shutil.rmtree(folder, ignore_errors=True)
    for folder in root.glob(".fetch-*"):
        if folder.name != f".fetch-{name}":
            shutil.rmtree(folder, ignore_errors=True)


def run(location: str, folder: Path, token_file: str = "", wait: float = 1800.0) -> None:
    """Fetches a version as soon as the store has it."""
    configure_logging("fetch", "")
    log, began, told = get_logger(__name__), time.monotonic(), ""
    headers = Security.of_token_file(token_file).headers()
    while True:
        try:
            count = fetch_model(location, headers, folder)
            log.info("fetched", source=location, folder=str(folder), files=count)
            return
        except ArealError as error:
            waited = time.monotonic() - began
            if isinstance(error, InvalidInput) or waited > wait:
                sys.exit(f"waited {waited:.0f} s for {location}: {error}")
            if str(error) != told:
                log.info("not_yet", cause=str(error))
            told = str(error)
        time.sleep(_TRY_AGAIN_S)  # a store that is not there yet tells no one when it comes


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m areal.weights.fetch")
    parser.add_argument(
        "location", help="http://host:port/versions/NAME or s3://bucket/prefix/NAME."
    )
    parser.add_argument("folder", type=Path, help="Folder for the files.")
    parser.add_argument(
        "--token-file", default="", help="File with the token; default: AREAL_TOKEN."
    )
    parser.add_argument(
        "--wait", type=float, default=1800.0, help="How long to wait for the version, in seconds."
    )
    run(**vars(parser.parse_args()))
