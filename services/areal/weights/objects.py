"""Versions in an object store: S3, Google Cloud Storage, Azure.

    s3://bucket/prefix/v00000012-inc3/{model.safetensors, config.json, …, manifest.json}

The manifest is written last and deleted first, so a version that has one is complete. The object
store's own checksums do not reach the reader, so a reader compares the manifest's digests.

Credentials, region and endpoint come from the environment or the machine's identity, as obstore
reads them (AWS_*, GOOGLE_*, AZURE_*). None is taken from a configuration, and none is in an error.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Self

from areal.config.transports import in_object_store
from areal.errors import InvalidInput
from areal.weights.manifest import (
    MANIFEST,
    PolicyVersion,
    WeightFile,
    from_json,
    parse_version_dir,
    to_json,
)
from areal.weights.publisher import (
    NewVersion,
    TransportError,
    companions,
    describe,
    patience_s,
    pieces,
)
from areal.weights.safetensors import Layout, file_digest
from areal.weights.store_client import (
    CHUNK_BYTES,
    MAX_MANIFEST_BYTES,
    TIMEOUT_S,
    StoreConnection,
    split_location,
)

if TYPE_CHECKING:
    from obstore.store import ObjectStore as Client

_COMPANIONS = "companions.json"
_PROBE = ".areal-access"
_LANES = 4
_MOST_PARTS = 10_000
_RETRIED_FOR_S = 30.0
_NAMED_CAUSE = re.compile(r"<Code>([^<]*)</Code>(?:\s*<Message>([^<]*)</Message>)?")
_SYSTEM_CAUSE = re.compile(r'message: "([^"]+)"')


class ObjectStore:
    """The versions below one prefix; blocking, for any number of threads.

    Example:
        >>> ObjectStore("s3://models/arithmetic/seed-1").manifest("v00000012-inc3")

    Every method raises TransportError with the URL and the cause in one line if the store does not
    answer for half a minute, or refuses.
    """

    def __init__(self, url: str) -> None:
        """Connects on first use; `url` is {s3,gs,az}://bucket/prefix."""
        from obstore.store import from_url

        self.url = url.rstrip("/")
        with self._failing(""):
            self._client: Client = from_url(
                self.url,
                client_options={
                    "allow_http": True,  # of an endpoint that the environment names
                    "connect_timeout": timedelta(seconds=5),
                    "timeout": timedelta(seconds=TIMEOUT_S),
                },
                retry_config={
                    # The time decides: ten refused connections can pass in a second.
                    "max_retries": 1000,
                    "retry_timeout": timedelta(seconds=_RETRIED_FOR_S),
                },
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Does nothing: no connection is held open."""

    @contextmanager
    def _failing(self, path: str) -> Iterator[None]:
        from obstore.exceptions import BaseError

        try:
            yield
        except (OSError, ValueError, BaseError) as error:
            where = f"{self.url}/{path}".rstrip("/")
            raise TransportError(f"{where}: {_cause(error)}") from None

    # ── reading ─────────────────────────────────────────────────────────────────────────────

    def manifest(self, name: str) -> PolicyVersion:
        """Returns the manifest of a complete version."""
        return replace(from_json(self._small(f"{name}/{MANIFEST}")), path=f"{self.url}/{name}")

    def companions(self, name: str) -> list[WeightFile]:
        """Returns tokenizer and configuration files next to a version's weights."""
        try:
            return [
                WeightFile(**entry) for entry in json.loads(self._small(f"{name}/{_COMPANIONS}"))
            ]
        except (ValueError, TypeError) as error:
            raise InvalidInput(f"{self.url}/{name}/{_COMPANIONS}: {error!r}") from None

    def read_into(self, name: str, file: str, offset: int, target: memoryview) -> None:
        """Fills `target` with the bytes of a file from `offset` on."""
        import obstore

        for start in range(0, target.nbytes, CHUNK_BYTES):
            with target[start : start + CHUNK_BYTES] as part, self._failing(f"{name}/{file}"):
                part[:] = memoryview(
                    obstore.get_range(
                        self._client, f"{name}/{file}", start=offset + start, length=part.nbytes
                    )
                )

    def versions(self) -> list[PolicyVersion]:
        """Returns every complete version, oldest first."""
        return [self.manifest(name) for name in self.names(whole=True)]

    def names(self, *, whole: bool = False) -> list[str]:
        """Returns names of versions, oldest first; `whole`: without those still being uploaded."""
        paths = self.files()
        found = {path.partition("/")[0] for path in paths if not whole or path.endswith(MANIFEST)}
        return sorted(
            filter(parse_version_dir, found), key=lambda name: parse_version_dir(name) or ()
        )

    def check_whole(self, version: PolicyVersion) -> None:
        """Raises InvalidInput unless the stored files match the published ones in name and size."""
        name = version.path.rpartition("/")[2]
        if self.manifest(name).files != version.files:
            raise InvalidInput(f"{version.path}: holds a different version from the one published")
        held = self.sizes(name)
        for file in version.files:
            if held.get(file.name) != file.size_bytes:
                raise InvalidInput(
                    f"{version.path}/{file.name}: {held.get(file.name)} bytes, "
                    f"expected {file.size_bytes}"
                )

    def sizes(self, name: str) -> dict[str, int]:
        """Returns the size of each file below `name`, whether the version is complete or not."""
        import obstore

        with self._failing(name):
            found = obstore.list(self._client, f"{name}/").collect()
        return {each["path"].removeprefix(f"{name}/"): each["size"] for each in found}

    def files(self) -> list[str]:
        """Returns the path of every object."""
        import obstore

        with self._failing(""):
            return [entry["path"] for entry in obstore.list(self._client).collect()]

    def read(self, path: str) -> bytes:
        """Returns the whole content of an object."""
        import obstore

        with self._failing(path):
            return bytes(obstore.get(self._client, path).bytes())

    def written_at(self, path: str) -> float:
        """Returns when an object was written, in seconds since the epoch."""
        import obstore

        with self._failing(path):
            return obstore.head(self._client, path)["last_modified"].timestamp()

    def _small(self, path: str) -> bytes:
        import obstore

        with self._failing(path):
            answer = obstore.get(self._client, path)
            if answer.meta["size"] > MAX_MANIFEST_BYTES:
                raise ValueError(f"{answer.meta['size']} bytes, expected a manifest")
            return bytes(answer.bytes())

    # ── writing ─────────────────────────────────────────────────────────────────────────────

    def check_access(self) -> None:
        """Tests access: writes, lists and deletes, as a run will do."""
        self.put(_PROBE, b"")
        self.names()
        self.remove([_PROBE])

    def put(self, path: str, data: bytes) -> None:
        """Writes an object; it appears whole or not at all."""
        import obstore

        with self._failing(path):
            obstore.put(self._client, path, data)

    def put_weights(self, new: NewVersion, layout: Layout) -> None:
        """Writes the safetensors file from the tensors' memory, in parts.

        A part is tried again by itself. Nothing is visible before the last one has arrived.
        """
        import obstore

        patience = patience_s(layout.size_bytes)
        deadline = time.monotonic() + patience

        def parts() -> Iterator[memoryview]:
            for piece in pieces(new, layout, CHUNK_BYTES):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"not uploaded within {patience:.0f} s")
                yield piece

        path = f"{new.name}/{new.weights_file}"
        with self._failing(path):
            obstore.put(
                self._client,
                path,
                parts(),
                chunk_size=max(CHUNK_BYTES, layout.size_bytes // _MOST_PARTS + 1),
                max_concurrency=_LANES,
            )

    def delete(self, name: str) -> None:
        """Removes a version, its manifest first."""
        import obstore

        with self._failing(name):
            paths = [entry["path"] for entry in obstore.list(self._client, name).collect()]
        manifest = [path for path in paths if path.endswith(MANIFEST)]
        for some in (manifest, [path for path in paths if path not in manifest]):
            self.remove(some)

    def remove(self, paths: Sequence[str]) -> None:
        """Deletes objects; those that are not there are passed over."""
        import obstore

        with self._failing(paths[0] if paths else ""):
            for path in paths:
                obstore.delete(self._client, path)


class ObjectPublisher:
    """Publishes versions to an object store; see `publisher.Publisher`."""

    name = "object store"

    def __init__(self, url: str) -> None:
        self._url = url

    def publish(self, new: NewVersion, announce: Callable[[PolicyVersion], None]) -> PolicyVersion:
        """Uploads, the manifest last, then announces."""
        store = ObjectStore(self._url)
        described, layout = describe(new)
        manifest = replace(described, path=f"{store.url}/{new.name}")
        if new.name not in store.names(whole=True):
            beside = []
            for file in companions(new.model) if new.adapter is None else ():
                store.put(f"{new.name}/{file.name}", file.read_bytes())
                beside.append(WeightFile(file.name, file.stat().st_size, file_digest(file)))
            if new.adapter is not None:
                small, content = new.small_file()
                store.put(f"{new.name}/{small}", content)
            store.put(f"{new.name}/{_COMPANIONS}", json.dumps([asdict(f) for f in beside]).encode())
            store.put_weights(new, layout)
            store.put(f"{new.name}/{MANIFEST}", to_json(manifest).encode())
        try:  # a trainer may have died between its upload and this
            announce(manifest)
        except InvalidInput as error:
            raise TransportError(str(error)) from None
        return manifest


def open_remote(
    location: str, headers: Mapping[str, str]
) -> tuple[StoreConnection | ObjectStore, str]:
    """Returns a version's store and its name there; not for use by several threads.

    Args:
        location: http://host:port/versions/NAME of a weight store, or {s3,gs,az}://…/NAME.
        headers: The weight store's bearer token.

    Raises:
        InvalidInput: It is neither.
    """
    if not in_object_store(location):
        url, name = split_location(location)
        return StoreConnection(url, headers, TIMEOUT_S), name
    url, _, name = location.rpartition("/")
    if parse_version_dir(name) is None:
        raise InvalidInput(f"{location[:200]!r}: expected s3://bucket/prefix/NAME")
    return ObjectStore(url), name


def _cause(error: Exception) -> str:
    """Returns the important part of a long error, without a query, which may hold a signature."""
    text = str(error)
    if named := _NAMED_CAUSE.search(text):
        return ": ".join(part for part in named.groups() if part)
    first = re.sub(r"\?\S+", "", text.partition("\n")[0]).strip()
    system = _SYSTEM_CAUSE.search(text)
    return f"{first}: {system[1]}" if system else first
