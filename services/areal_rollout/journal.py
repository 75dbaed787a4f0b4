"""The model calls of an interrupted episode, kept for its next attempt.

A call is known by (digest of the request, how many equal requests came before it in this episode).
The next attempt runs the workflow from its start: a call found in the journal is answered from it
if it had finished, and continued from its tokens if it had not.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict

import orjson
from google.protobuf.message import DecodeError

from areal.errors import InvalidInput
from areal.protocol import routes
from areal.protocol.trajectories import GroupCodec
from areal.types import LLMRequest, LLMResponse, StopReason
from areal.v1 import trajectory_pb2 as pb

CallKey = tuple[str, int]


def request_digest(request: LLMRequest) -> str:
    """Returns the digest of a request's prompt, images, sampling parameters and grammar."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(orjson.dumps([request.input_ids, asdict(request.gconfig)]))
    digest.update(request.grammar.encode())
    for image in request.images:
        digest.update(hashlib.blake2b(image, digest_size=16).digest())
    return digest.hexdigest()


def encode(
    calls: Iterable[tuple[LLMRequest, LLMResponse]],
    max_bytes: int,
    codec: GroupCodec | None = None,
) -> bytes:
    """Packs the calls that have tokens.

    Args:
        calls: In the order in which they were made; a response that has not ended has stop
            reason ABORT and the tokens it got so far.
        max_bytes: A longer journal loses its routes; one that is longer still is dropped.
        codec: Packs groups, too.

    Returns:
        Bytes for `decode`; empty if there is nothing worth keeping.
    """
    seen: Counter[str] = Counter()
    journal = pb.Journal()
    for request, response in calls:
        digest = request_digest(request)
        occurrence = seen[digest]
        seen[digest] += 1
        if response.output_tokens:
            journal.calls.add(
                request_digest=digest,
                occurrence=occurrence,
                tokens=response.output_tokens,
                logprobs=response.output_logprobs,
                versions=response.output_versions,
                stop_reason=response.stop_reason,
                interruptions=response.interruptions,
                latency_s=response.latency_s,
                servers=response.servers,
                routed_experts=routes.tensor_of(response.routed_experts),
            )
    codec = codec or GroupCodec()
    routed = any(call.HasField("routed_experts") for call in journal.calls)
    packed = codec.compress(journal.SerializeToString(), routed=routed)
    if len(packed) > max_bytes:
        for call in journal.calls:
            call.ClearField("routed_experts")
        packed = codec.compress(journal.SerializeToString())
    return packed if len(packed) <= max_bytes else b""


def decode(
    packed: bytes, max_bytes: int, codec: GroupCodec | None = None
) -> dict[CallKey, LLMResponse]:
    """Returns the calls of an earlier attempt; `input_tokens` is left empty.

    Args:
        packed: Bytes from `encode`, possibly written by another version of this program.
        max_bytes: As in `encode`; the unpacked journal may have 20 times as much.
        codec: Packs groups, too.

    Raises:
        ValueError: It is not a journal of ours; start from the beginning.
    """
    try:
        journal = pb.Journal.FromString((codec or GroupCodec()).expand(packed, 20 * max_bytes))
    except (InvalidInput, DecodeError) as error:
        raise ValueError(f"journal: {error}") from None
    calls = {}
    for call in journal.calls:
        response = LLMResponse(
            input_tokens=[],
            output_tokens=list(call.tokens),
            output_logprobs=list(call.logprobs),
            output_versions=list(call.versions),
            stop_reason=StopReason(call.stop_reason),
            interruptions=call.interruptions + 1,
            latency_s=call.latency_s,
            servers=list(call.servers),
        )
        if call.HasField("routed_experts"):
            try:
                response.routed_experts = routes.array_of(call.routed_experts, "routed_experts")
            except InvalidInput as error:
                raise ValueError(f"journal: {error}") from None
        count = len(response.output_tokens)
        if count != len(response.output_logprobs) or count != len(response.output_versions):
            raise ValueError("journal arrays differ in length")
        calls[call.request_digest, call.occurrence] = response
    return calls
