"""The bytes between the service and a worker: [length u32][kind u8][body].

| kind    | direction | body                                                            |
|---------|-----------|-----------------------------------------------------------------|
| RECIPE  | to worker | JSON {digest, file_name, source}: remembered, not run yet       |
| SCORE   | to worker | ScoreRequest                                                    |
| READY   | to pool   | empty: imports are done                                         |
| RESULTS | to pool   | [n u32][n positions u32][ScoreResponse]: some items are done    |
| DONE    | to pool   | the same: the last of this request                              |
| STOPPED | to pool   | the same, as far as it came: the worker ends here               |
"""

from __future__ import annotations

import struct
from array import array
from enum import IntEnum

from areal.v1 import reward_service_pb2 as pb

HEADER = struct.Struct("<IB")
MAX_BODY_BYTES = 256 * 1024 * 1024


class Kind(IntEnum):
    """What a frame holds."""

    RECIPE = 1
    SCORE = 2
    READY = 3
    RESULTS = 4
    DONE = 5
    STOPPED = 6


def frame(kind: Kind, body: bytes) -> bytes:
    """Returns one encoded frame."""
    return HEADER.pack(len(body), kind) + body


def pack_results(positions: list[int], results: list[pb.ScoreResult]) -> bytes:
    """Returns the body of RESULTS and DONE; positions index the items of the request."""
    numbers = array("I", [len(positions), *positions])
    return numbers.tobytes() + pb.ScoreResponse(results=results).SerializeToString()


def unpack_results(body: bytes) -> tuple[list[int], list[pb.ScoreResult]]:
    """Reverses `pack_results`; raises ValueError for anything else."""
    if len(body) < 4:
        raise ValueError("results frame is too short")
    (count,) = struct.unpack_from("=I", body)
    end = 4 * (count + 1)
    positions = array("I", body[4:end]).tolist()
    try:
        results = list(pb.ScoreResponse.FromString(body[end:]).results)
    except Exception as error:  # protobuf's DecodeError, without importing its module
        raise ValueError(f"results frame: {error}") from None
    if len(positions) != count or len(results) != count:
        raise ValueError(f"results frame: {len(positions)} positions, {len(results)} results")
    return positions, results
