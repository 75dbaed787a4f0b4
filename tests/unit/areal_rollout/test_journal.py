import zlib

import numpy as np
import pytest

from areal.protocol.trajectories import GroupCodec
from areal.types import GenerationHyperparameters, LLMRequest, LLMResponse, StopReason
from areal.v1 import trajectory_pb2 as pb
from areal_rollout.journal import decode, encode, request_digest


def request(ids=(1, 2), **gconfig):
    return LLMRequest(list(ids), GenerationHyperparameters(**gconfig))


def response(count, stop=StopReason.ABORT):
    return LLMResponse(
        [1, 2],
        list(range(count)),
        [-0.1 * i / 3 for i in range(count)],
        [i // 2 for i in range(count)],
        stop,
        interruptions=1,
    )


def test_journal_when_decoded_then_bit_for_bit_what_was_encoded():
    same, other = request(), request((3,))
    calls = [
        (same, response(5, StopReason.STOP)),
        (other, response(3)),
        (same, response(7)),
        (same, response(0)),
    ]
    kept = decode(encode(calls, 1 << 20), 1 << 20)
    digest = request_digest(same)
    assert set(kept) == {(digest, 0), (request_digest(other), 0), (digest, 1)}
    first = kept[digest, 0]
    assert first.output_logprobs == response(5).output_logprobs
    assert first.output_versions == [0, 0, 1, 1, 2]
    assert first.stop_reason is StopReason.STOP
    assert kept[digest, 1].stop_reason is StopReason.ABORT
    assert kept[digest, 1].interruptions == 2


def routed(count, rows):
    answer = response(count)
    shape = (rows, 3, 2)
    answer.routed_experts = np.random.default_rng(0).integers(0, 255, shape).astype(np.uint8)
    return answer


def test_journal_when_a_call_has_routes_then_they_come_back():
    given = routed(5, 6)
    kept = decode(encode([(request(), given)], 1 << 20), 1 << 20)
    found = kept[request_digest(request()), 0].routed_experts
    np.testing.assert_array_equal(found, given.routed_experts)


def test_journal_when_routes_make_it_too_long_then_it_is_kept_without_them():
    call = (request(), routed(5, 300))
    assert len(encode([call], 1 << 20)) > 1000
    (found,) = decode(encode([call], 1000), 1000).values()
    assert found.output_tokens == response(5).output_tokens
    assert found.routed_experts is None


def test_journal_when_routes_are_broken_then_it_is_no_journal_of_ours():
    journal = pb.Journal()
    tensor = pb.Tensor(dtype="uint8", shape=[3, 3, 2], data=b"12")
    journal.calls.add(request_digest="a", stop_reason="stop", routed_experts=tensor)
    with pytest.raises(ValueError, match="routed_experts"):
        decode(journal.SerializeToString(), 1000)


def test_journal_when_the_first_of_two_equal_calls_got_no_token_then_the_second_keeps_its_place():
    """The rerun's first call must not be answered with what the second one got."""
    same = request()
    kept = decode(encode([(same, response(0)), (same, response(4))], 1 << 20), 1 << 20)
    assert set(kept) == {(request_digest(same), 1)}


def test_digest_when_anything_that_matters_differs_then_differs():
    requests = [
        request(),
        request((1,)),
        request((1, 2, 3)),
        request(temperature=0.5),
        request(max_new_tokens=3),
        request(stop_token_ids=[1]),
    ]
    assert len({request_digest(r) for r in requests}) == len(requests)
    named = LLMRequest([1, 2], GenerationHyperparameters(), rid="x", affinity_key="y")
    assert request_digest(named) == request_digest(request())


def test_journal_when_nothing_was_generated_or_too_much_then_empty():
    assert encode([(request(), response(0))], 1 << 20) == b""
    assert encode([(request(), response(100))], 20) == b""
    assert decode(b"", 100) == {}


CALL = {"request_digest": "x", "tokens": [1], "versions": [3], "stop_reason": "stop"}


@pytest.mark.parametrize(
    "raw",
    [
        b"garbage",
        GroupCodec().compress(b"0" * 1_000)[:-1],
        zlib.compress(b"[]"),  # as an earlier release packed it
        pb.Journal(calls=[pb.JournaledCall(**CALL)]).SerializeToString(),
        pb.Journal(
            calls=[pb.JournaledCall(**{**CALL, "logprobs": [0.0], "stop_reason": "tired"})]
        ).SerializeToString(),
        GroupCodec().compress(b"0" * 10_000_000),
    ],
)
def test_journal_when_malformed_then_value_error(raw):
    with pytest.raises(ValueError, match=r"."):
        decode(raw, 10_000)


def test_journal_when_a_later_release_adds_fields_then_still_read():
    whole = pb.Journal(calls=[pb.JournaledCall(**CALL, logprobs=[0.0])]).SerializeToString()
    assert set(decode(whole + b"\xba\x3e\x03new", 10_000)) == {("x", 0)}
