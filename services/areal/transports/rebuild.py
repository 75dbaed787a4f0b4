"""A version's file, made of an earlier version's file and a delta."""

from __future__ import annotations

import mmap
import shutil
from pathlib import Path

from areal.errors import InvalidInput
from areal.tensor_file import TensorPlace, parse_header, read_layout
from areal.transports.base import in_threads
from areal.transports.delta import FILE, Delta
from areal.weights import SINGLE_FILE, DeltaFile, read_manifest


def rebuild(folder: Path, base: Path, wanted: DeltaFile) -> None:
    """Writes `model.safetensors` into a folder that has the delta; blocking.

    What comes out is checked by whoever publishes or loads it: here only that the chain fits.

    Args:
        folder: Has `delta.bin`.
        base: Folder of the version that the delta starts from.
        wanted: What the manifest says of the delta.

    Raises:
        InvalidInput: The base is another one than the delta's, or the delta does not fit it.
    """
    delta = Delta((folder / FILE).read_bytes())
    found = read_manifest(base).digest
    if not found == wanted.base_digest == delta.base_digest:
        raise InvalidInput(
            f"{FILE}: starts from weights {delta.base_digest[:16]}…, "
            f"{base.name} holds {found[:16]}…"
        )
    target = folder / SINGLE_FILE
    shutil.copyfile(base / SINGLE_FILE, target)
    layout = read_layout(target)
    with (
        target.open("r+b") as stream,
        mmap.mmap(stream.fileno(), 0) as mapped,
        memoryview(mapped) as view,
    ):
        unknown = set(delta.names()) - {place.name for place in layout.places}
        if unknown:
            raise InvalidInput(f"{FILE}: tensor {min(unknown)} is unknown to {base.name}")

        def apply(place: TensorPlace) -> None:
            with view[place.begin : place.end] as part:
                delta.apply(place.name, place.dtype, part)

        in_threads(apply, layout.places)
        parse_header(bytes(view[: len(layout.header)]), target)
