"""Messages that no client should send: found by reflection, made from descriptors by hypothesis."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pool
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

# A long poll may well wait: the test does not. Whatever comes later is in the log.
CALL_S = 0.5
# A stream without an end ends here.
STREAM_S = 0.15
AT_ONCE = 8
# The chassis refuses messages above this.
LIMIT_BYTES = 128 * 1024 * 1024
# What a client's own mistake may be answered with. Not among them: UNKNOWN, INTERNAL, DATA_LOSS
# (a bug), UNAVAILABLE (the process is gone), UNIMPLEMENTED (reflection had named the method).
FINE = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.OUT_OF_RANGE,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
}
_TYPES = FieldDescriptor
_MAX_DEPTH = 6


WHOLE = "10"


@pytest.fixture(params=["short", pytest.param("whole", marks=pytest.mark.long)])
def fuzz_budget(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that uses it exists twice: as it is, and long, with ten times as many examples."""
    if request.param == "whole" and "AREAL_FUZZ" not in os.environ:
        monkeypatch.setenv("AREAL_FUZZ", WHOLE)


def examples(short: int) -> int:
    """How many examples: AREAL_FUZZ=50 makes fifty times as many, and new ones each time."""
    return short * int(os.environ.get("AREAL_FUZZ", "1"))


def fuzz_settings(short: int) -> settings:
    """Bounded, without a deadline per example; the short form is the same every time."""
    return settings(
        max_examples=examples(short),
        derandomize="AREAL_FUZZ" not in os.environ,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )


def channel_to(address: str) -> grpc.Channel:
    """A channel that sends anything."""
    return grpc.insecure_channel(
        address,
        options=[
            ("grpc.max_send_message_length", -1),
            ("grpc.max_receive_message_length", -1),
            ("grpc.use_local_subchannel_pool", 1),
        ],
    )


def discover(channel: grpc.Channel, prefix: str = "") -> list[MethodDescriptor]:
    """Every method of every service that the server's reflection names."""
    database = ProtoReflectionDescriptorDatabase(channel)
    pool = descriptor_pool.DescriptorPool(database)
    return [
        method
        for name in sorted(database.get_services())
        if name.startswith(prefix)
        for method in pool.FindServiceByName(name).methods
    ]


@dataclass
class Words:
    """Strings and messages that lead deeper than random ones."""

    strings: Sequence[str] = ()
    numbers: Sequence[int] = ()
    seeds: dict[str, list[Message]] = field(default_factory=dict)
    """By method name: valid requests, to be mutated."""


def _whole_numbers(low: int, high: int, words: Words) -> st.SearchStrategy[int]:
    edges = [0, 1, 2, 3, 10, -1, low, high, 2**21, 2**31 - 1, 2**53, 2**53 - 1, *words.numbers]
    inside = [edge for edge in edges if low <= edge <= high]
    return st.sampled_from(inside) | st.integers(low, high)


def _strings(words: Words) -> st.SearchStrategy[str]:
    odd = ["", "\x00", "x" * 10_000, "\U0001f600" * 3000, "../..", "/", "a\nb", "[" * 2000, "{}"]
    return st.sampled_from([*odd, *words.strings]) | st.text(max_size=40)


def _scalar(spec: FieldDescriptor, words: Words) -> st.SearchStrategy[Any]:
    kind = spec.cpp_type
    if kind == _TYPES.CPPTYPE_STRING:
        if spec.type == _TYPES.TYPE_BYTES:
            return st.binary(max_size=60) | st.sampled_from([b"", b"\x00" * 10_000])
        return _strings(words)
    if kind == _TYPES.CPPTYPE_BOOL:
        return st.booleans()
    if kind == _TYPES.CPPTYPE_ENUM:
        known = [value.number for value in spec.enum_type.values]
        return st.sampled_from([*known, *known, -1, 99, 2**31 - 1])
    if kind in (_TYPES.CPPTYPE_DOUBLE, _TYPES.CPPTYPE_FLOAT):
        return st.floats(width=32)
    bits = 32 if kind in (_TYPES.CPPTYPE_INT32, _TYPES.CPPTYPE_UINT32) else 64
    if kind in (_TYPES.CPPTYPE_UINT32, _TYPES.CPPTYPE_UINT64):
        return _whole_numbers(0, 2**bits - 1, words)
    return _whole_numbers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1, words)


def _is_map(spec: FieldDescriptor) -> bool:
    return spec.message_type is not None and spec.message_type.GetOptions().map_entry


def _fill(draw: Any, message: Message, spec: FieldDescriptor, words: Words, depth: int) -> None:
    """Gives one field a random value."""
    name = spec.name
    if _is_map(spec):
        key, value = (spec.message_type.fields_by_name[part] for part in ("key", "value"))
        pairs = st.dictionaries(_scalar(key, words), _scalar(value, words), max_size=3)
        getattr(message, name).update(draw(pairs))
    elif spec.message_type is not None:
        many = draw(st.sampled_from([1, 1, 2, 3])) if spec.is_repeated else 1
        for _ in range(many):
            inner = getattr(message, name).add() if spec.is_repeated else getattr(message, name)
            inner.SetInParent()
            _fill_all(draw, inner, words, depth + 1)
    elif spec.is_repeated:
        values = draw(st.lists(_scalar(spec, words), max_size=4))
        getattr(message, name).extend(values * draw(st.sampled_from([1, 1, 1, 2, 500])))
    else:
        setattr(message, name, draw(_scalar(spec, words)))


def _fill_all(draw: Any, message: Message, words: Words, depth: int = 0) -> None:
    if message.DESCRIPTOR.full_name == "google.protobuf.Duration":
        # Mostly none, so that calls come back; sometimes more than a duration may be.
        message.seconds = draw(
            st.sampled_from([0, 0, 0, 0, 1, -1, 3 * 10**11, 4 * 10**11, 2**63 - 1])
        )
        message.nanos = draw(st.sampled_from([0, 10_000_000, 999_999_999, -1, 2**31 - 1]))
        return
    for spec in message.DESCRIPTOR.fields:
        if depth <= _MAX_DEPTH and draw(st.integers(0, 3)):
            _fill(draw, message, spec, words, depth)


@st.composite
def _random_message(draw: Any, descriptor: Descriptor, words: Words) -> Message:
    message: Message = GetMessageClass(descriptor)()
    _fill_all(draw, message, words)
    return message


@st.composite
def _mutated(draw: Any, seeds: list[Message], words: Words) -> Message:
    """A valid request with one to three fields somewhere inside replaced."""
    seed = draw(st.sampled_from(seeds))
    message: Message = type(seed)()
    message.CopyFrom(seed)
    for _ in range(draw(st.integers(1, 3))):
        at, depth = message, 0
        while True:
            spec = draw(st.sampled_from(list(at.DESCRIPTOR.fields)))
            value = getattr(at, spec.name)
            inner = spec.message_type is not None and (len(value) if spec.is_repeated else 1)
            leaf = not inner or not spec.message_type.fields or _is_map(spec)
            if leaf or draw(st.integers(0, 4)) == 0:
                at.ClearField(spec.name)
                if draw(st.integers(0, 5)):
                    _fill(draw, at, spec, words, depth)
                break
            at = value[draw(st.integers(0, len(value) - 1))] if spec.is_repeated else value
            depth += 1
    return message


@st.composite
def _damaged(draw: Any, whole: st.SearchStrategy[Message]) -> bytes:
    """Cut short, or with bytes changed."""
    data = bytearray(draw(whole).SerializeToString())
    if draw(st.booleans()):
        return bytes(data[: draw(st.integers(0, len(data)))])
    for _ in range(draw(st.integers(1, 4))):
        if data:
            data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    return bytes(data)


def payloads(method: MethodDescriptor, words: Words) -> st.SearchStrategy[bytes]:
    """Requests of a method, from well-formed to noise."""
    whole: st.SearchStrategy[Message] = _random_message(method.input_type, words)
    if seeds := words.seeds.get(method.name):
        whole = st.one_of(whole, *[_mutated(seeds, words)] * 2)
    return st.one_of(
        whole.map(lambda message: message.SerializeToString()),
        whole.map(lambda message: message.SerializeToString()),
        _damaged(whole),
        st.binary(max_size=200),
    )


class Caller:
    """Sends bytes to one method and tells the status that came back."""

    def __init__(self, channel: grpc.Channel, method: MethodDescriptor) -> None:
        self.path = f"/{method.containing_service.full_name}/{method.name}"
        kinds = ("unary", "stream")
        kind = f"{kinds[method.client_streaming]}_{kinds[method.server_streaming]}"
        self._streams_in, self._streams_out = method.client_streaming, method.server_streaming
        self._call: Callable[..., Any] = getattr(channel, kind)(self.path)

    def send(self, requests: list[bytes], timeout: float = 0.0) -> list[tuple[str, str]]:
        """Status names and details, all requests at once."""
        timeout = timeout or (STREAM_S if self._streams_out else CALL_S)
        if self._streams_in:
            return [self._read(self._call(iter(requests), timeout=timeout))]
        if self._streams_out:
            calls = [self._call(request, timeout=timeout) for request in requests]
            return [self._read(call) for call in calls]
        futures = [self._call.future(request, timeout=timeout) for request in requests]
        return [(call.code().name, call.details() or "") for call in futures]

    @staticmethod
    def _read(call: Any) -> tuple[str, str]:
        try:
            for _ in call:
                pass
        except grpc.RpcError:
            pass
        return call.code().name, call.details() or ""


def fuzz_method(channel: grpc.Channel, method: MethodDescriptor, words: Words, short: int) -> str:
    """Sends `short` times up to eight requests; tells of a status that only a bug gives, or ''."""
    caller = Caller(channel, method)
    fine = {code.name for code in FINE}
    if not caller.path.startswith("/areal."):  # health has a method that gRPC left out
        fine.add("UNIMPLEMENTED")

    @fuzz_settings(short)
    @given(st.lists(payloads(method, words), min_size=1, max_size=AT_ONCE))
    def run(requests: list[bytes]) -> None:
        answers = caller.send(requests)
        for request, (code, details) in zip(requests, answers, strict=False):
            assert code in fine, f"{caller.path}: {code}: {details[:500]}\n{request[:500]!r}"

    try:
        run()
    except AssertionError as error:
        return str(error)
    return ""


def send_too_large(channel: grpc.Channel, method: MethodDescriptor) -> tuple[str, str]:
    """A message above the limit of the transport."""
    return Caller(channel, method).send([bytes(LIMIT_BYTES + 1)], timeout=30)[0]


def send_padded(channel: grpc.Channel, method: MethodDescriptor, size: int) -> tuple[str, str]:
    """An empty request with a field that no message has, of that size."""
    # Field 15000, length-delimited.
    head = _varint(15000 << 3 | 2) + _varint(size)
    return Caller(channel, method).send([head + bytes(size)], timeout=5)[0]


def _varint(number: int) -> bytes:
    parts = []
    while number > 127:
        parts.append(number & 127 | 128)
        number >>= 7
    return bytes([*parts, number])
