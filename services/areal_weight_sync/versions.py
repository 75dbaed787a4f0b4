"""The published versions' files: verified before a server loads them, deleted once they are old."""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
import threading
from collections.abc import Iterable
from pathlib import Path

from areal.chassis.logging import get_logger
from areal.chassis.rare_log import RareLog
from areal.config.transports import in_object_store
from areal.errors import InvalidInput
from areal.weights.delta import complete
from areal.weights.manifest import SPARE, PolicyVersion, parse_version_dir
from areal.weights.objects import ObjectStore
from areal.weights.publisher import TransportError
from areal.weights.safetensors import file_digest

_STAGING = re.compile(r"\.staging-v(\d{8,})-inc(\d+)")


class DigestCache:
    """Verifies files against a manifest, hashing each file once however many servers load it."""

    def __init__(self) -> None:
        self._digests: dict[Path, tuple[tuple[int, int, int], str]] = {}
        self._whole: tuple[str, str] = ("", "")
        self._lock = threading.Lock()  # verify() runs in threads: hash a file once, not N times

    def verify(self, manifest: PolicyVersion) -> None:
        """Checks size and digest of every file of a version; blocking.

        One that was published as a delta is made whole first. Of an object store sizes only: what
        is read from there is compared by who loads it.

        Raises:
            InvalidInput: Names the file, what it is and what was expected.
        """
        if in_object_store(manifest.path):
            self._look(manifest)
            return
        folder = Path(manifest.path)
        if manifest.delta is not None:
            with self._lock:
                complete(folder, manifest.delta)
        for expected in manifest.files:
            if Path(expected.name).name != expected.name:
                raise InvalidInput(f"version {manifest.version}: file name {expected.name!r}")
            file = folder / expected.name
            try:
                stat = file.stat()
            except OSError as error:
                raise InvalidInput(f"{file}: {error.strerror}") from None
            if stat.st_size != expected.size_bytes:
                raise InvalidInput(
                    f"{file}: {stat.st_size} bytes, expected {expected.size_bytes}: truncated"
                )
            with self._lock:
                key = (stat.st_size, stat.st_mtime_ns, stat.st_ino)
                known = self._digests.get(file)
                if known is None or known[0] != key:
                    known = (key, file_digest(file))
                    self._digests[file] = known
            if known[1] != expected.digest:
                raise InvalidInput(
                    f"{file}: digest {known[1][:16]}…, expected {expected.digest[:16]}…: "
                    f"the file is not the one that was published"
                )

    def _look(self, manifest: PolicyVersion) -> None:
        with self._lock:
            if self._whole == (manifest.path, manifest.digest):
                return
            try:
                ObjectStore(manifest.path.rpartition("/")[0]).check_whole(manifest)
            except TransportError as error:
                raise InvalidInput(str(error)) from None
            self._whole = manifest.path, manifest.digest

    def forget(self, folder: Path) -> None:
        """Drops what is known of a deleted folder, whose path may be relative."""
        gone = folder.resolve()
        with self._lock:
            for file in [f for f in self._digests if f.parent.resolve() == gone]:
                del self._digests[file]


def collect_garbage(root: Path, current: int, keep: int, in_use: Iterable[str] = ()) -> list[Path]:
    """Deletes published versions below `root` that are older than the newest `keep`.

    Only folders with a published (or staging) name directly below `root` are touched: never a
    model directory or a checkpoint. Staging folders of versions that lie behind are leftovers of
    a trainer that died while writing. One folder is kept as `.spare`, for its pages: the next
    version is written over it.

    Args:
        root: The weights root; may not exist.
        current: The current version: newer folders (being published) do not count.
        keep: How many versions <= current stay.
        in_use: Paths that must stay.

    Returns:
        The folders deleted.
    """
    if not root.is_dir():
        return []
    keep_paths = {Path(path).resolve() for path in in_use if path}
    published: list[tuple[int, int, Path]] = []
    doomed: list[Path] = []
    for folder in root.iterdir():
        parsed = parse_version_dir(folder.name)
        staging = _STAGING.fullmatch(folder.name)
        if parsed is not None and parsed[0] <= current:
            published.append((*parsed, folder))
        elif staging is not None and int(staging[1]) < current:
            doomed.append(folder)
    kept_versions = sorted({entry[0] for entry in published})[-keep:]
    doomed += [path for version, _, path in published if version not in kept_versions]
    deleted = [f for f in doomed if f.resolve() not in keep_paths and not f.is_symlink()]
    for folder in deleted:
        if not folder.name.startswith(".") and not (root / SPARE).exists():
            with contextlib.suppress(OSError):
                folder.rename(root / SPARE)
                continue
        shutil.rmtree(folder, ignore_errors=True)
    return deleted


def collect_objects(url: str, current: int, keep: int, in_use: Iterable[str]) -> list[str]:
    """Does the same in an object store; what a killed trainer left unfinished expires."""
    store, numbers = ObjectStore(url), {}
    for name in store.names():
        parsed = parse_version_dir(name)
        if parsed is not None and parsed[0] <= current:
            numbers[name] = parsed[0]
    kept = sorted(set(numbers.values()))[-keep:]
    busy = set(in_use)
    gone = [n for n, v in numbers.items() if v not in kept and f"{store.url}/{n}" not in busy]
    for name in gone:
        store.delete(name)
    return gone


async def collect(
    root: Path,
    objects: str,
    current: int,
    keep: int,
    in_use: Iterable[str],
    digests: DigestCache,
    routine: RareLog,
) -> None:
    """Runs `collect_garbage` and `collect_objects` in a thread, and logs the result."""
    log, busy = get_logger(__name__), list(in_use)
    names = []
    try:
        deleted = await asyncio.to_thread(collect_garbage, root, current, keep, busy)
        if objects:
            names = await asyncio.to_thread(collect_objects, objects, current, keep, busy)
    except (OSError, TransportError) as error:
        log.warning("garbage_not_collected", error=str(error))
        return
    for folder in deleted:
        digests.forget(folder)
    if names or deleted:
        routine.info("old_versions_deleted", folders=[*names, *(f.name for f in deleted)])
