"""A version's file, made of an earlier version's file and a delta."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import numpy as np

from areal.errors import InvalidInput
from areal.weights.delta import FILE, Delta
from areal.weights.manifest import SINGLE_FILE, SPARE, DeltaFile, parse_version_dir, read_manifest
from areal.weights.publisher import in_threads, write_at
from areal.weights.safetensors import TensorPlace, digest_of, read_layout

_PARTIAL = ".partial"


def complete(folder: Path, wanted: DeltaFile) -> None:
    """Makes a published folder whole that has a delta only, unless it is; blocking.

    It is whole or has no `model.safetensors`, whenever this process is killed.

    Args:
        folder: Published; its base lies beside it.
        wanted: What its manifest says of the delta.

    Raises:
        InvalidInput: The base is not there or another one, the delta is damaged, or the volume is
            full.
    """
    if (folder / SINGLE_FILE).exists():
        return
    base = folder.parent / wanted.base
    names = [parse_version_dir(name) for name in (folder.name, wanted.base)]
    if None in names or not (base / SINGLE_FILE).is_file():
        raise InvalidInput(f"{FILE}: its base {wanted.base[:80]!r} is not in {folder.parent}")
    try:
        with suppress(OSError):  # its pages are there already
            (folder.parent / SPARE / SINGLE_FILE).rename(folder / _PARTIAL)
        rebuild(folder, base, wanted, name=_PARTIAL)
        (folder / _PARTIAL).rename(folder / SINGLE_FILE)
    except OSError as error:
        raise InvalidInput(f"{folder}: {error.strerror or error}") from None


def rebuild(folder: Path, base: Path, wanted: DeltaFile, *, name: str = SINGLE_FILE) -> None:
    """Writes the whole file into a folder that has the delta; blocking.

    What comes out is checked by whoever publishes or loads it: here only that the chain fits.

    Args:
        folder: Has `delta.bin`.
        base: Folder of the version that the delta starts from.
        wanted: What the manifest says of the delta.
        name: Of the file; one that is there is written over.

    Raises:
        InvalidInput: The base is another one than the delta's, or the delta does not fit it.
    """
    delta = open_delta((folder / FILE).read_bytes(), wanted)
    found = read_manifest(base).digest
    if found != delta.base_digest:
        raise InvalidInput(
            f"{FILE}: starts from weights {delta.base_digest[:16]}…, "
            f"{base.name} holds {found[:16]}…"
        )
    layout = read_layout(base / SINGLE_FILE)
    delta.check_names({place.name for place in layout.places}, base.name)
    held = np.memmap(base / SINGLE_FILE, np.uint8, "r")
    target = os.open(folder / name, os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        os.ftruncate(target, layout.size_bytes)
        write_at(target, memoryview(layout.header), 0)

        def apply(place: TensorPlace) -> None:
            data = np.array(held[place.begin : place.end])
            delta.apply(place.name, place.dtype, data.data)
            write_at(target, data.data, place.begin)

        in_threads(apply, layout.places)
    finally:
        os.close(target)


def open_delta(raw: bytes, wanted: DeltaFile) -> Delta:
    """A delta that is the one which a manifest names.

    Raises:
        InvalidInput: It is another one, truncated or damaged.
    """
    if len(raw) != wanted.size_bytes:
        raise InvalidInput(f"{FILE}: {len(raw)} bytes, expected {wanted.size_bytes}: truncated")
    found = digest_of(raw)
    if found != wanted.digest:
        raise InvalidInput(f"{FILE}: digest {found[:16]}…, expected {wanted.digest[:16]}…")
    delta = Delta(raw)
    if delta.base_digest != wanted.base_digest:
        raise InvalidInput(
            f"{FILE}: starts from weights {delta.base_digest[:16]}…, expected "
            f"{wanted.base_digest[:16]}…"
        )
    return delta
