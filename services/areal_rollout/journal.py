"""The model calls of an interrupted episode, kept for its next attempt.

A call is known by (digest of the request, how many equal requests came before it in this episode).
The next attempt runs the workflow from its start: a call found in the journal is answered from it
if it had finished, and continued from its tokens if it had not.
"""

from __future__ import annotations

import hashlib
import zlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict

import orjson

from areal.types import LLMRequest, LLMResponse, StopReason

_FORMAT = 1

CallKey = tuple[str, int]


def request_digest(request: LLMRequest) -> str:
    """Of what determines a generation: the prompt and the sampling parameters."""
    content = orjson.dumps([request.input_ids, asdict(request.gconfig)])
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def encode(calls: Iterable[tuple[LLMRequest, LLMResponse]], max_bytes: int) -> bytes:
    """Compresses the calls that have tokens.

    Args:
        calls: In the order in which they were made; a response that has not ended has stop
            reason ABORT and the tokens it got so far.
        max_bytes: A longer journal is dropped.

    Returns:
        Bytes for `decode`; empty if there is nothing worth keeping.
    """
    seen: Counter[str] = Counter()
    entries = []
    for request, response in calls:
        digest = request_digest(request)
        occurrence = seen[digest]
        seen[digest] += 1
        if response.output_tokens:
            entries.append(
                {
                    "call": [digest, occurrence],
                    "tokens": response.output_tokens,
                    "logprobs": response.output_logprobs,
                    "versions": response.output_versions,
                    "stop": response.stop_reason,
                    "interruptions": response.interruptions,
                }
            )
    if not entries:
        return b""
    packed = zlib.compress(orjson.dumps({"format": _FORMAT, "calls": entries}), 1)
    return packed if len(packed) <= max_bytes else b""


def decode(journal: bytes, max_bytes: int) -> dict[CallKey, LLMResponse]:
    """The calls of an earlier attempt; `input_tokens` is left empty.

    Args:
        journal: From `encode`, perhaps of another version of this program.
        max_bytes: As in `encode`; bounds what is unpacked to 20 times as much.

    Raises:
        ValueError: It is none of ours; start afresh.
    """
    if not journal:
        return {}
    unpacker = zlib.decompressobj()
    try:
        raw = unpacker.decompress(journal, 20 * max_bytes)
        content = orjson.loads(raw)
        if content["format"] != _FORMAT:
            raise ValueError(f"journal format {content['format']!r}")
        calls = {}
        for entry in content["calls"]:
            digest, occurrence = entry["call"]
            response = LLMResponse(
                input_tokens=[],
                output_tokens=entry["tokens"],
                output_logprobs=entry["logprobs"],
                output_versions=entry["versions"],
                stop_reason=StopReason(entry["stop"]),
                interruptions=entry["interruptions"] + 1,
            )
            count = len(response.output_tokens)
            if count != len(response.output_logprobs) or count != len(response.output_versions):
                raise ValueError("journal arrays differ in length")
            calls[digest, occurrence] = response
    except (zlib.error, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"journal: {type(error).__name__}: {error}") from None
    return calls
