"""`disk`: a Hugging Face folder on a volume that the servers mount.

Writing into the pages of an old file takes a fifth of the time that new pages take (they are
allocated and cleared first), so a folder that garbage collection retires is kept as `.spare` and
becomes the next staging folder. No one reads it then: see `areal_weight_sync.versions`.

With deltas only the changes are written here. Weight-sync builds the complete file from them before
it tells any server (`delta.complete`), and servers that hold the previous version read only the
delta.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from areal.chassis.logging import get_logger
from areal.errors import InvalidInput
from areal.weights.delta import FILE, DeltaChain
from areal.weights.manifest import (
    PolicyVersion,
    at_path,
    open_staging,
    publish_dir,
    staging_dir,
    version_dir,
    write_manifest,
)
from areal.weights.publisher import (
    NewVersion,
    TransportError,
    companions,
    describe,
    in_threads,
    manifest_of,
    write_at,
)
from areal.weights.safetensors import HostTensor, TensorPlace, plan_layout


class DiskPublisher:
    """Publishes versions to a folder; see `Publisher`."""

    name = "disk"

    def __init__(self, root: Path, *, chain: DeltaChain | None = None) -> None:
        """Publishes below a folder.

        Args:
            root: An absolute path that weight-sync knows by the same name.
            chain: Makes it write only the changes if they are less than half; None: always
                everything.
        """
        self._root = root
        self._chain = chain
        self._log = get_logger(__name__)

    def publish(self, new: NewVersion, announce: Callable[[PolicyVersion], None]) -> PolicyVersion:
        """Writes the folder, renames it into place, announces it."""
        try:
            manifest = self._publish_delta(new, announce)
            if manifest is None:
                manifest = self._write(new)
                announce(manifest)
        except OSError as error:
            raise TransportError(f"{self._root}: {error.strerror or error}") from None
        except InvalidInput as error:  # weight-sync does not see this volume
            raise TransportError(str(error)) from None
        if self._chain is not None and new.adapter is None:
            self._chain.advance(manifest, new)
        return manifest

    def _publish_delta(
        self, new: NewVersion, announce: Callable[[PolicyVersion], None]
    ) -> PolicyVersion | None:
        """Leaves the whole file to weight-sync; None: it must be written here."""
        chain = self._chain if new.adapter is None else None
        encoded = chain.encode(new) if chain is not None else None
        if encoded is None:
            return None
        file, raw = encoded
        staging = staging_dir(self._root, new.version, new.incarnation)
        final = version_dir(self._root, new.version, new.incarnation)
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir()
        for source in companions(new.model):
            shutil.copyfile(source, staging / source.name)
        (staging / FILE).write_bytes(raw)
        manifest = replace(describe(new)[0], delta=file)
        write_manifest(manifest, staging)
        publish_dir(staging, final)
        manifest = at_path(manifest, final)
        try:
            announce(manifest)
        except InvalidInput as error:  # its base is gone: the chain starts again
            self._log.warning(
                "delta_refused", version=new.version, base=file.base, cause=str(error)
            )
            shutil.rmtree(final)
            return None
        self._log.info("delta_sent", version=new.version, base=file.base, size_bytes=len(raw))
        return manifest

    def _write(self, new: NewVersion) -> PolicyVersion:
        # A server may have mapped the file of an adapter that it still holds.
        whole = new.adapter is None
        staging = open_staging(self._root, new.version, new.incarnation, reuse=whole)
        final = version_dir(self._root, new.version, new.incarnation)
        for file in companions(new.model) if whole else ():
            shutil.copyfile(file, staging / file.name)
        if not whole:
            name, content = new.small_file()
            (staging / name).write_bytes(content)
        manifest = write_version(staging, new)
        publish_dir(staging, final)
        return at_path(manifest, final)


def write_version(folder: Path, new: NewVersion) -> PolicyVersion:
    """Writes tensors and manifest into a folder that has its configuration already.

    Raises:
        OSError: The volume is full, read-only or not available.
    """
    layout = plan_layout(new.tensors)
    by_name = {tensor.name: tensor for tensor in new.tensors}
    descriptor = os.open(folder / new.weights_file, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        os.ftruncate(descriptor, layout.size_bytes)
        write_at(descriptor, memoryview(layout.header), 0)

        def write(place: TensorPlace) -> str:
            tensor: HostTensor = by_name[place.name]
            write_at(descriptor, tensor.data, place.begin)
            return tensor.digest

        digests = dict(
            zip(
                (place.name for place in layout.places),
                in_threads(write, layout.places),
                strict=True,
            )
        )
    finally:
        os.close(descriptor)
    manifest = manifest_of(new, layout, digests)
    write_manifest(manifest, folder)
    return manifest
