"""`stream`: the trainer uploads a version to the weight store, once however many servers there are.

Chunks go straight from the tensors' memory to the socket, over two connections. Each carries its
digest and its place; one that fails is sent again, and the store shows nothing before all is right.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from areal.chassis.logging import get_logger
from areal.weights import delta
from areal.weights.delta import DeltaChain
from areal.weights.manifest import SINGLE_FILE, PolicyVersion, at_path, to_json
from areal.weights.publisher import NewVersion, TransportError, describe, in_threads
from areal.weights.safetensors import Layout
from areal.weights.store_client import CHUNK_BYTES, StoreConnection

_ATTEMPTS = 3
_LANES = 2
_SMALL_BYTES = 256 << 10
_JOINED_BYTES = 4 << 20


class StreamPublisher:
    """See `base.Publisher`."""

    name = "stream"

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str],
        timeout: float,
        *,
        chain: DeltaChain | None = None,
    ) -> None:
        """Uploads to a store.

        Args:
            url: http://host:port.
            headers: The bearer token.
            timeout: Bounds each wait on the socket, in seconds.
            chain: Has only what changed uploaded, where that is less than half; None: all of it.
        """
        self._url = url
        self._headers = headers
        self._timeout = timeout
        self._chain = chain
        self._log = get_logger("areal.weights.stream")

    def publish(self, new: NewVersion, announce: Callable[[PolicyVersion], None]) -> PolicyVersion:
        """Uploads, then announces the folder that the store made of it."""
        if not self._url:
            raise TransportError("endpoints.weight_store '': there is no weight store")
        with self._connect() as store:
            manifest, layout = describe(new)
            blocks = _blocks(new, layout)
            published = self._send_delta(store, new, manifest, blocks)
            if published is None:
                store.begin(new.name, to_json(manifest))
                self._upload(new.name, blocks, {f.name: f.size_bytes for f in manifest.files})
                published = at_path(manifest, Path(store.commit(new.name, manifest.size_bytes)))
        announce(published)
        if self._chain is not None:
            self._chain.advance(published, new)
        return published

    def _send_delta(
        self, store: StoreConnection, new: NewVersion, manifest: PolicyVersion, blocks: list[_Block]
    ) -> PolicyVersion | None:
        """What the store made of it; None when the whole file must be sent."""
        encoded = self._chain.encode(new) if self._chain is not None else None
        if encoded is None:
            return None
        file, raw = encoded
        manifest = replace(manifest, delta=file)
        chunks = [
            (delta.FILE, start, memoryview(raw)[start : start + CHUNK_BYTES])
            for start in range(0, len(raw), CHUNK_BYTES)
        ]
        totals = {f.name: f.size_bytes for f in manifest.files} | {delta.FILE: len(raw)}
        try:
            store.begin(new.name, to_json(manifest))
            small = [block for block in blocks if block[0] != SINGLE_FILE]
            self._upload(new.name, small + chunks, totals)
            path = store.commit(new.name, manifest.size_bytes)
        except TransportError as error:  # its base is gone: the chain starts again
            self._log.warning(
                "delta_refused", version=new.version, base=file.base, cause=str(error)
            )
            return None
        self._log.info("delta_sent", version=new.version, base=file.base, size_bytes=len(raw))
        return at_path(manifest, Path(path))

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


def _blocks(new: NewVersion, layout: Layout) -> list[_Block]:
    """What to send: (file, offset, bytes)."""
    by_name = {tensor.name: tensor for tensor in new.tensors}
    config = memoryview((new.model / "config.json").read_bytes())
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
    return blocks
