"""`stream`: the trainer uploads a version once to the weight store, for any number of servers.

Chunks are sent directly from the tensors' memory, over two connections. Each carries its digest and
its position. A failed chunk is sent again, and the store shows the version only when all are
correct.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from areal.chassis.logging import get_logger
from areal.security import Security
from areal.weights import delta
from areal.weights.delta import DeltaChain
from areal.weights.manifest import PolicyVersion, at_path, to_json
from areal.weights.publisher import NewVersion, TransportError, describe, in_threads, pieces
from areal.weights.store_client import CHUNK_BYTES, StoreConnection

_ATTEMPTS = 3
_LANES = 2


class StreamPublisher:
    """Uploads versions to the weight store; see `Publisher`."""

    name = "stream"

    def __init__(
        self,
        url: str,
        security: Security,
        timeout: float,
        *,
        chain: DeltaChain | None = None,
    ) -> None:
        """Uploads to a store.

        Args:
            url: http://host:port.
            security: The bearer token.
            timeout: Bounds each wait on the socket, in seconds.
            chain: Makes it upload only the changes if they are less than half; None: always
                everything.
        """
        self._url = url
        self._security = security
        self._timeout = timeout
        self._chain = chain
        self._log = get_logger(__name__)

    def publish(self, new: NewVersion, announce: Callable[[PolicyVersion], None]) -> PolicyVersion:
        """Uploads, then announces the folder that the store made of it."""
        if not self._url:
            raise TransportError("endpoints.weight_store '': there is no weight store")
        with self._connect() as store:
            manifest, layout = describe(new)
            published = self._send_delta(store, new, manifest)
            if published is None:
                weights = {new.weights_file: pieces(new, layout, CHUNK_BYTES)}
                published = self._send(store, new, manifest, weights)
        announce(published)
        if self._chain is not None and new.adapter is None:
            self._chain.advance(published, new)
        return published

    def _send_delta(
        self, store: StoreConnection, new: NewVersion, manifest: PolicyVersion
    ) -> PolicyVersion | None:
        """Uploads a delta; returns the store's answer, None when the whole file must be sent."""
        chain = self._chain if new.adapter is None else None
        encoded = chain.encode(new) if chain is not None else None
        if encoded is None:
            return None
        file, raw = encoded
        whole = memoryview(raw)
        parts = (whole[n : n + CHUNK_BYTES] for n in range(0, len(raw), CHUNK_BYTES))
        try:
            sent = self._send(store, new, replace(manifest, delta=file), {delta.FILE: parts})
        except TransportError as error:  # its base is gone: the chain starts again
            self._log.warning(
                "delta_refused", version=new.version, base=file.base, cause=str(error)
            )
            return None
        self._log.info("delta_sent", version=new.version, base=file.base, size_bytes=len(raw))
        return sent

    def _connect(self) -> StoreConnection:
        own = self._security
        return StoreConnection(self._url, own.headers(), self._timeout, untried=own.untried)

    def _send(
        self,
        store: StoreConnection,
        new: NewVersion,
        manifest: PolicyVersion,
        files: Mapping[str, Iterable[memoryview]],
    ) -> PolicyVersion:
        """Uploads the configuration and these files, and has the store check them."""
        small, content = new.small_file()
        chunks = [
            (file, offset, chunk)
            for file, parts in {small: [memoryview(content)], **files}.items()
            for offset, chunk in _chunks(parts)
        ]
        totals = {f.name: f.size_bytes for f in manifest.files}
        if manifest.delta is not None:
            totals[delta.FILE] = manifest.delta.size_bytes
        store.begin(new.name, to_json(manifest))

        def lane(number: int) -> None:
            with self._connect() as own:
                for file, offset, chunk in chunks[number::_LANES]:
                    for attempt in range(1, _ATTEMPTS + 1):
                        try:
                            own.put(new.name, file, chunk, offset, totals[file])
                            break
                        except TransportError:
                            if attempt == _ATTEMPTS:
                                raise

        in_threads(lane, range(_LANES))
        return at_path(manifest, Path(store.commit(new.name, manifest.size_bytes)))


def _chunks(parts: Iterable[memoryview]) -> Iterator[tuple[int, list[memoryview]]]:
    """Offsets in the file, and what is sent together."""
    begin, size, together = 0, 0, list[memoryview]()
    for part in parts:
        if together and size + part.nbytes > CHUNK_BYTES:
            yield begin, together
            begin, size, together = begin + size, 0, []
        together.append(part)
        size += part.nbytes
    if together:
        yield begin, together
