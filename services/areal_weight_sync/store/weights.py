"""The weight store: versions uploaded by a trainer, and versions that servers pull. Files only.

    begin(manifest) ─> .staging-vN-incM/ with files of their final size
    write(file, offset, bytes), in any order, any number of times
    commit() ─> every file's digest checked ─> vN-incM/, which `disk` could have written

What a manifest does not declare is not stored, and nothing is visible before all of it is right.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from areal.errors import CapacityExceeded, InvalidInput, NotFound
from areal.weights.adapters import check_against
from areal.weights.delta import FILE, rebuild
from areal.weights.manifest import (
    MANIFEST,
    MAX_POLICY_VERSION,
    SINGLE_FILE,
    DeltaFile,
    PolicyVersion,
    open_staging,
    parse_version_dir,
    publish_dir,
    staging_dir,
    version_dir,
    write_manifest,
)
from areal.weights.publisher import companions
from areal.weights.safetensors import file_digest

_MAX_FILES = 10_000
_FILE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,254}")
_MAX_DELTA_BYTES = 16 << 30
_RESERVE_BYTES = 64 << 20
"""Bytes left free on the volume, which Redis or logs may share."""


class WeightStore:
    """Stores versions below one folder. Every method blocks on the disk."""

    def __init__(self, root: Path, model: Path) -> None:
        """Keeps versions below `root`; tokenizer files come from `model`."""
        self._root = root
        self._model = model

    def begin(self, manifest: PolicyVersion, base: PolicyVersion | None) -> None:
        """Makes room for a version; whatever was uploaded of it before is dropped.

        Args:
            manifest: Lists files and tensors; its path does not matter.
            base: Version 0, whose tensors it must have.

        Raises:
            InvalidInput: A file or tensor is not what it should be.
            CapacityExceeded: The volume has no room for it.
        """
        _check_manifest(manifest)
        if base is not None:
            check_against(manifest, base)
        whole = manifest.adapter is None
        staging = open_staging(self._root, manifest.version, manifest.incarnation, reuse=whole)
        if SINGLE_FILE not in {file.name for file in manifest.files}:
            (staging / SINGLE_FILE).unlink(missing_ok=True)
        free = shutil.disk_usage(self._root).free
        held = sum(file.stat().st_size for file in staging.iterdir())
        if manifest.size_bytes > free + held - _RESERVE_BYTES:
            shutil.rmtree(staging)
            raise CapacityExceeded(
                f"{self._root}: {free >> 20} MiB free, version {manifest.version} takes "
                f"{manifest.size_bytes >> 20} MiB; see checkpoint.keep"
            )
        sizes = {file.name: file.size_bytes for file in manifest.files}
        if manifest.delta is not None:
            self._base_of(manifest.delta)
            sizes[FILE] = manifest.delta.size_bytes
        for name, size in sizes.items():
            with (staging / name).open("ab") as stream:
                stream.truncate(size)
        write_manifest(manifest, staging)

    def open_upload(self, name: str, file: str, begin: int, end: int) -> int:
        """A descriptor to write bytes [begin, end) of an announced file; the caller closes it.

        Raises:
            NotFound: The version's upload was not started, or it has no such file.
            InvalidInput: The range lies outside of the file.
        """
        path = self._staging(name) / file
        if Path(file).name != file or file == MANIFEST or not path.is_file():
            raise NotFound(f"{name}/{file}: was not announced")
        size = path.stat().st_size
        if not 0 <= begin < end <= size:
            raise InvalidInput(f"{name}/{file}: bytes {begin} to {end} of {size}")
        return os.open(path, os.O_WRONLY)

    def commit(self, name: str, manifest: PolicyVersion) -> Path:
        """Checks every file and makes the version visible.

        Raises:
            NotFound: The upload was not started.
            InvalidInput: Names the first file that is not what the manifest says.
        """
        staging = self._staging(name)
        if manifest.delta is not None:
            rebuild(staging, self._base_of(manifest.delta), manifest.delta)
        for file in manifest.files:
            digest = file_digest(staging / file.name)
            if digest != file.digest:
                raise InvalidInput(
                    f"{name}/{file.name}: digest {digest[:16]}…, expected {file.digest[:16]}…"
                )
        declared = {file.name for file in manifest.files}
        # The model's own files beside an adapter would mean that it adds tokens.
        for source in companions(self._model) if manifest.adapter is None else ():
            if source.name not in declared:
                shutil.copyfile(source, staging / source.name)
        final = version_dir(self._root, manifest.version, manifest.incarnation)
        publish_dir(staging, final)
        return final

    def folder(self, name: str) -> Path:
        """Returns where a published version is.

        Raises:
            NotFound: There is none of that name.
        """
        if parse_version_dir(name) is None or not (self._root / name / MANIFEST).is_file():
            raise NotFound(f"version {name[:80]!r}: not in the weight store")
        return self._root / name

    def _base_of(self, delta: DeltaFile) -> Path:
        """The folder that a delta starts from; raises NotFound."""
        if delta.size_bytes > _MAX_DELTA_BYTES or delta.size_bytes <= 0:
            raise CapacityExceeded(f"{FILE}: {delta.size_bytes} bytes, at most {_MAX_DELTA_BYTES}")
        return self.folder(delta.base)

    def _staging(self, name: str) -> Path:
        parsed = parse_version_dir(name)
        if parsed is None or not (staging := staging_dir(self._root, *parsed)).is_dir():
            raise NotFound(f"version {name[:80]!r}: no upload was begun")
        return staging


def _check_manifest(manifest: PolicyVersion) -> None:
    if not 0 < manifest.version < MAX_POLICY_VERSION or manifest.incarnation < 0:
        raise InvalidInput(f"version {manifest.version}: cannot be uploaded")
    if not 0 < len(manifest.files) <= _MAX_FILES:
        raise InvalidInput(f"files: {len(manifest.files)}, expected 1 to {_MAX_FILES}")
    for file in manifest.files:
        if not _FILE_NAME.fullmatch(file.name):
            raise InvalidInput(
                f"file name {file.name!r}: expected letters, digits and ._- only, and no dot first"
            )
        if file.size_bytes < 0:
            raise InvalidInput(f"file {file.name}: {file.size_bytes} bytes")
