"""`disk`: a Hugging Face folder on a volume that the servers mount.

Writing into the pages of an old file takes a fifth of the time that new pages take (they are
allocated and cleared first), so a folder that garbage collection retires is kept as `.spare` and
becomes the next staging folder. Nobody reads it then: see `areal_weight_sync.published`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from areal.errors import InvalidInput
from areal.tensor_file import HostTensor, TensorPlace, digest_of, plan_layout
from areal.transports.base import NewVersion, TransportError, companions, in_threads
from areal.weights import (
    SINGLE_FILE,
    SPARE,
    PolicyVersion,
    WeightFile,
    WeightTensor,
    assemble_manifest,
    at_path,
    publish_dir,
    staging_dir,
    version_dir,
    write_manifest,
)


class DiskPublisher:
    """See `base.Publisher`."""

    name = "disk"

    def __init__(self, root: Path) -> None:
        """Publishes below `root`, an absolute path that weight-sync knows by the same name."""
        self._root = root

    def publish(self, new: NewVersion, announce: Callable[[PolicyVersion], None]) -> PolicyVersion:
        """Writes the folder, renames it into place, announces it."""
        try:
            manifest = self._write(new)
        except OSError as error:
            raise TransportError(f"{self._root}: {error.strerror or error}") from None
        try:
            announce(manifest)
        except InvalidInput as error:  # weight-sync does not see this volume
            raise TransportError(str(error)) from None
        return manifest

    def _write(self, new: NewVersion) -> PolicyVersion:
        staging = staging_dir(self._root, new.version, new.incarnation)
        final = version_dir(self._root, new.version, new.incarnation)
        shutil.rmtree(staging, ignore_errors=True)
        self._root.mkdir(parents=True, exist_ok=True)
        try:
            (self._root / SPARE).rename(staging)
        except OSError:
            staging.mkdir()
        for file in staging.iterdir():
            if file.name != SINGLE_FILE:
                file.unlink()
        for file in companions(new.model):
            shutil.copyfile(file, staging / file.name)
        manifest = write_version(staging, new)
        publish_dir(staging, final)
        return at_path(manifest, final)


def write_version(folder: Path, new: NewVersion) -> PolicyVersion:
    """Writes tensors and manifest into a folder that has its config.json already.

    Raises:
        OSError: The volume is full, read-only or away.
    """
    layout = plan_layout(new.tensors)
    by_name = {tensor.name: tensor for tensor in new.tensors}
    descriptor = os.open(folder / SINGLE_FILE, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        os.ftruncate(descriptor, layout.size_bytes)
        _write_at(descriptor, memoryview(layout.header), 0)

        def write(place: TensorPlace) -> str:
            tensor: HostTensor = by_name[place.name]
            _write_at(descriptor, tensor.data, place.begin)
            return digest_of(tensor.data)

        digests = dict(
            zip(
                (place.name for place in layout.places),
                in_threads(write, layout.places),
                strict=True,
            )
        )
    finally:
        os.close(descriptor)
    manifest = assemble_manifest(
        folder,
        new.version,
        new.incarnation,
        [WeightFile(SINGLE_FILE, layout.size_bytes, layout.file_digest(digests))],
        [WeightTensor(p.name, p.shape, p.dtype, digests[p.name]) for p in layout.places],
    )
    write_manifest(manifest, folder)
    return manifest


def _write_at(descriptor: int, data: memoryview, offset: int) -> None:
    while data.nbytes:  # one call writes 2 GiB at most
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written
