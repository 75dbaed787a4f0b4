"""`stream`: the trainer uploads a version to the weight store, once however many servers there are.

Chunks go straight from the tensors' memory to the socket, over two connections. Each carries its
digest and its place; one that fails is sent again, and the store shows nothing before all is right.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from areal.observability.logging import get_logger
from areal.tensor_file import digest_of, plan_layout
from areal.transports import delta
from areal.transports.base import NewVersion, TransportError, companions, in_threads
from areal.transports.wire import CHUNK_BYTES, StoreConnection
from areal.weights import (
    SINGLE_FILE,
    DeltaFile,
    PolicyVersion,
    WeightFile,
    WeightTensor,
    assemble_manifest,
    at_path,
    to_json,
    version_name,
)

_ATTEMPTS = 3
_LANES = 2
_SMALL_BYTES = 256 << 10
_JOINED_BYTES = 4 << 20


class StreamPublisher:
    """See `base.Publisher`."""

    name = "stream"

    def __init__(
        self, url: str, headers: Mapping[str, str], timeout: float, *, encoding: str = "full"
    ) -> None:
        """Uploads to a store.

        Args:
            url: http://host:port.
            headers: The bearer token.
            timeout: Bounds each wait on the socket, in seconds.
            encoding: full, or delta: what changed, where that is less than half of it.
        """
        self._url = url
        self._headers = headers
        self._timeout = timeout
        self._encoding = encoding
        self._base: tuple[PolicyVersion, NewVersion] | None = None
        self._log = get_logger("areal.transports.stream")

    def publish(self, new: NewVersion, announce: Callable[[PolicyVersion], None]) -> PolicyVersion:
        """Uploads, then announces the folder that the store made of it."""
        if not self._url:
            raise TransportError("endpoints.weight_store '': there is no weight store")
        with self._connect() as store, tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            for file in companions(new.model):
                if file.name == "config.json":
                    (folder / file.name).write_bytes(file.read_bytes())
            manifest, blocks = _describe(new, folder)
            path = self._send_delta(store, new, manifest, blocks)
            if not path:
                store.begin(new.name, to_json(manifest))
                self._upload(new.name, blocks, {f.name: f.size_bytes for f in manifest.files})
                path = store.commit(new.name)
        manifest = at_path(manifest, Path(path))
        announce(manifest)
        if self._encoding == "delta":
            self._base = manifest, new
        return manifest

    def _send_delta(
        self, store: StoreConnection, new: NewVersion, manifest: PolicyVersion, blocks: list[_Block]
    ) -> str:
        """The path at the store; "" when the whole file must be sent."""
        if self._base is None:
            return ""
        base, before = self._base
        held = {tensor.name: tensor.data for tensor in before.tensors}
        raw = None
        if held.keys() == {tensor.name for tensor in new.tensors}:
            raw = delta.encode(new.tensors, held, base.digest)
        if raw is None:  # too much has changed
            return ""
        name = version_name(base.version, base.incarnation)
        file = DeltaFile(name, base.digest, len(raw), digest_of(raw))
        chunks = [
            (delta.FILE, start, memoryview(raw)[start : start + CHUNK_BYTES])
            for start in range(0, len(raw), CHUNK_BYTES)
        ]
        totals = {f.name: f.size_bytes for f in manifest.files} | {delta.FILE: len(raw)}
        try:
            store.begin(new.name, to_json(replace(manifest, delta=file)))
            small = [block for block in blocks if block[0] != SINGLE_FILE]
            self._upload(new.name, small + chunks, totals)
            path = store.commit(new.name)
        except TransportError as error:  # its base is gone: the chain begins anew
            self._log.warning("delta_refused", version=new.version, base=name, cause=str(error))
            return ""
        self._log.info("delta_sent", version=new.version, base=name, size_bytes=len(raw))
        return path

    def _connect(self) -> StoreConnection:
        return StoreConnection(self._url, self._headers, self._timeout)

    def _upload(self, name: str, blocks: list[_Block], totals: Mapping[str, int]) -> None:

        def lane(number: int) -> None:
            with self._connect() as store:
                for file, offset, data in blocks[number::_LANES]:
                    for attempt in range(1, _ATTEMPTS + 1):
                        try:
                            store.put(name, file, data, offset, totals[file])
                            break
                        except TransportError:
                            if attempt == _ATTEMPTS:
                                raise

        in_threads(lane, range(_LANES))


_Block = tuple[str, int, memoryview]


def _describe(new: NewVersion, folder: Path) -> tuple[PolicyVersion, list[_Block]]:
    """The manifest, and what to send: (file, offset, bytes)."""
    layout = plan_layout(new.tensors)
    by_name = {tensor.name: tensor for tensor in new.tensors}
    names = [place.name for place in layout.places]
    digests = dict(zip(names, in_threads(lambda n: digest_of(by_name[n].data), names), strict=True))
    manifest = assemble_manifest(
        folder,
        new.version,
        new.incarnation,
        [WeightFile(SINGLE_FILE, layout.size_bytes, layout.file_digest(digests))],
        [WeightTensor(p.name, p.shape, p.dtype, digests[p.name]) for p in layout.places],
    )
    config = memoryview((folder / "config.json").read_bytes())
    blocks: list[_Block] = [("config.json", 0, config)]
    blocks.append((SINGLE_FILE, 0, memoryview(layout.header)))
    small: list[memoryview] = []  # biases and norms travel together
    begin = size = 0
    for place in layout.places:
        data = by_name[place.name].data
        if data.nbytes < _SMALL_BYTES:
            begin = begin if small else place.begin
            small.append(data)
            size += data.nbytes
        if small and (data.nbytes >= _SMALL_BYTES or size >= _JOINED_BYTES):
            blocks.append((SINGLE_FILE, begin, memoryview(b"".join(small))))
            small, size = [], 0
        if data.nbytes >= _SMALL_BYTES:
            for start in range(0, data.nbytes, CHUNK_BYTES):
                part = data[start : start + CHUNK_BYTES]
                blocks.append((SINGLE_FILE, place.begin + start, part))
    if small:
        blocks.append((SINGLE_FILE, begin, memoryview(b"".join(small))))
    return manifest, blocks
