"""Versions that this server has pulled, for the next one to pull: the weight store's two GETs.

| request                             | answers                                         |
|-------------------------------------|-------------------------------------------------|
| GET /versions/NAME/manifest.json    | 200: what the store had told this server        |
| GET /versions/NAME/FILE       Range | 206: that part of the parameters, copied        |

A set of weights may be filled with a newer version while it is read. That is noticed here, or by
the digests that the other server compares.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from areal.weights.manifest import MANIFEST, to_json
from areal.weights.store_client import MAX_CHUNK_BYTES
from areal_inference.http_api.requests import json_response

if TYPE_CHECKING:
    from areal.weights.safetensors import Layout
    from areal_inference.model.weights import WeightSet

_RANGE = re.compile(r"bytes=(\d{1,15})-(\d{1,15})")


class Giving:
    """The route; `sets` are the weights that this server holds now."""

    def __init__(self, sets: Callable[[], Iterable[WeightSet]]) -> None:
        self._sets = sets

    async def get(self, http: HttpRequest) -> Response:
        """Returns a file, or part of a file, of a version that this server holds."""
        name, file = http.path_params["name"], http.path_params["file"]
        for weights in self._sets():
            published = weights.published
            if published is not None and published.name == name:
                break
        else:
            return _refusal(404, f"version {name[:80]!r}: not held here")
        if file == MANIFEST:
            return Response(to_json(published.manifest), media_type="application/json")
        if (layout := published.layouts.get(file)) is None:
            return _refusal(404, f"{name}/{file[:80]}: not a file of weights of this version")
        match = _RANGE.fullmatch(http.headers.get("range", ""))
        begin, end = (int(match[1]), int(match[2]) + 1) if match else (0, 0)
        size = layout.size_bytes
        if not 0 <= begin < end <= size or end - begin > MAX_CHUNK_BYTES:
            return _refusal(
                416, f"Range: expected bytes=FIRST-LAST within {size}, at most {MAX_CHUNK_BYTES}"
            )
        body = await asyncio.to_thread(_read, weights, layout, begin, end)
        if weights.published is not published:
            return _refusal(404, f"version {name}: no longer held here")
        headers = {"Content-Range": f"bytes {begin}-{end - 1}/{size}"}
        return Response(body, 206, headers, "application/octet-stream")


def _read(weights: WeightSet, layout: Layout, begin: int, end: int) -> bytes:
    """Reads bytes of a file that was never written."""
    parts = [layout.header[begin:end]]
    for place in layout.places:
        if place.begin < end and begin < place.end:
            first, last = max(begin, place.begin), min(end, place.end)
            parts.append(weights.part_of(place.name, first - place.begin, last - place.begin))
    return b"".join(parts)


def _refusal(status: int, error: str) -> Response:
    return json_response({"error": error}, status)
