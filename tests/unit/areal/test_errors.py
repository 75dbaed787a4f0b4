"""Each error class has one gRPC code and one HTTP status, wherever it is answered or caught."""

from __future__ import annotations

import http
import importlib
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry

from areal import errors
from areal.agents.replies import failure
from areal.chassis.interceptors import CallInterceptor
from areal.clients.base import from_rpc_error
from areal.errors import ArealError, WaitTimeout
from areal.v1 import rollout_service_pb2 as pb
from areal.v1 import rollout_service_pb2_grpc as pb_grpc
from areal_sandbox.e2b import connect

SERVICES = Path(__file__).resolve().parents[3] / "services"


def every_class() -> list[type[ArealError]]:
    """ArealError and what inherits from it, in the library and in each service."""
    lines = [
        (
            ".".join(file.relative_to(SERVICES).with_suffix("").parts),
            name,
            re.findall(r"\w+", bases),
        )
        for file in SERVICES.rglob("*.py")
        for name, bases in re.findall(r"^class (\w+)\((.*)\):$", file.read_text(), re.MULTILINE)
    ]
    found = {("areal.errors", "ArealError")}
    names: set[str] = set()
    while names != (names := {name for _, name in found}):
        found |= {(module, name) for module, name, bases in lines if names & set(bases)}
    kinds = [getattr(importlib.import_module(module), name) for module, name in sorted(found)]
    return [kind for kind in kinds if issubclass(kind, ArealError)]  # others have the same names


@pytest.fixture(scope="module")
def classes() -> list[type[ArealError]]:
    return every_class()


def made(kind: type[ArealError], message: str = "said") -> ArealError:
    """An error, without its class's own constructor."""
    return kind.__new__(kind, message)


def nearest(kind: type[ArealError]) -> type[ArealError]:
    """What a client has of it."""
    return next(each for each in kind.__mro__ if each.__module__ == "areal.errors")


class Raising(pb_grpc.RolloutServiceServicer):
    """Raises the errors that it is given, one a call."""

    def __init__(self) -> None:
        self.error: Exception = ArealError()

    async def GetTasks(self, request: pb.GetTasksRequest, context: Any) -> pb.GetTasksResponse:
        raise self.error


@pytest.fixture
async def service() -> AsyncIterator[tuple[Raising, grpc.aio.Channel]]:
    server = grpc.aio.server(interceptors=[CallInterceptor("test", CollectorRegistry())])
    pb_grpc.add_RolloutServiceServicer_to_server(raising := Raising(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield raising, channel
    await server.stop(None)


def test_errors_when_listed_then_each_has_a_code_of_grpc_and_a_status_of_http(
    classes: list[type[ArealError]],
) -> None:
    assert len(classes) > 20
    for kind in classes:
        assert kind.grpc_code in grpc.StatusCode.__members__, kind
        assert kind.grpc_code != "OK", kind
        assert http.HTTPStatus(kind.http_status) >= 400, kind
        assert kind.kind, kind


@pytest.mark.parametrize(
    ("kind", "code", "status", "word"),
    [
        (errors.InvalidInput, "INVALID_ARGUMENT", 400, "invalid_request_error"),
        (errors.ConfigError, "INVALID_ARGUMENT", 400, "invalid_request_error"),
        (errors.PromptTooLong, "INVALID_ARGUMENT", 400, "invalid_request_error"),
        (errors.CannotStart, "UNKNOWN", 500, "server_error"),
        (errors.NotFound, "NOT_FOUND", 404, "not_found_error"),
        (errors.Unauthenticated, "UNAUTHENTICATED", 401, "authentication_error"),
        (errors.StaleIncarnation, "FAILED_PRECONDITION", 500, "server_error"),
        (errors.LeaseLost, "FAILED_PRECONDITION", 410, "session_ended"),
        (errors.WrongStep, "FAILED_PRECONDITION", 500, "server_error"),
        (errors.CapacityExceeded, "RESOURCE_EXHAUSTED", 429, "rate_limit_error"),
        (errors.Unavailable, "UNAVAILABLE", 503, "overloaded_error"),
        (errors.WaitTimeout, "DEADLINE_EXCEEDED", 504, "timeout_error"),
        (errors.TrainingDiverged, "UNKNOWN", 500, "server_error"),
        (errors.WorkflowError, "ABORTED", 500, "server_error"),
        (errors.PromptDrift, "ABORTED", 500, "server_error"),
        (connect.AlreadyExists, "ALREADY_EXISTS", 409, "invalid_request_error"),
    ],
)
def test_error_when_clients_of_other_makers_read_its_codes_then_they_stay_as_published(
    kind: type[ArealError], code: str, status: int, word: str
) -> None:
    assert (kind.grpc_code, kind.http_status, kind.kind) == (code, status, word)


async def test_error_when_a_servicer_raises_it_then_the_client_raises_its_class_and_message(
    classes: list[type[ArealError]], service: tuple[Raising, grpc.aio.Channel]
) -> None:
    raising, channel = service
    for kind in classes:
        raising.error = made(kind)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await pb_grpc.RolloutServiceStub(channel).GetTasks(pb.GetTasksRequest(), timeout=60)
        assert caught.value.code().name == kind.grpc_code
        got = from_rpc_error(caught.value, "GetTasks", "here", 0.0)
        assert type(got) is nearest(kind)
        assert str(got) == "said" or (isinstance(got, WaitTimeout) and "(said)" in str(got))


async def test_error_when_the_client_does_not_know_its_name_then_the_code_says_its_class(
    service: tuple[Raising, grpc.aio.Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    raising, channel = service
    monkeypatch.setattr(errors, "name_of", lambda error: "OfANewerVersion")
    for kind, expected in (
        (errors.Unavailable, errors.Unavailable),
        (errors.CapacityExceeded, errors.CapacityExceeded),
        (errors.ConfigError, errors.InvalidInput),
        (errors.Unauthenticated, errors.Unauthenticated),
        (errors.WaitTimeout, errors.WaitTimeout),
        (errors.WrongStep, ArealError),
    ):
        raising.error = made(kind)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await pb_grpc.RolloutServiceStub(channel).GetTasks(pb.GetTasksRequest(), timeout=60)
        assert type(from_rpc_error(caught.value, "GetTasks", "here", 0.0)) is expected


def test_error_when_answered_over_http_then_every_server_has_the_same_status(
    classes: list[type[ArealError]],
) -> None:
    for kind in classes:
        error = made(kind)
        if kind is not errors.PromptTooLong:  # its message is made of its lengths
            status, body = failure(error, typed=False, anthropic=False)
            assert (status, body["error"]["type"]) == (kind.http_status, kind.kind)
        refusal = connect.refusal(error)
        assert refusal.status == kind.http_status
        code = json.loads(refusal.text or "")["code"]
        assert code == ("internal" if kind.http_status == 500 else kind.grpc_code.lower())


def test_subclass_when_it_sets_nothing_then_it_is_answered_like_its_base(
    classes: list[type[ArealError]],
) -> None:
    for kind in classes:

        class Own(kind):  # type: ignore[misc, valid-type]
            """A class of a recipe, or of another service."""

            def __init__(self, number: int) -> None:
                self.kind = number  # its own business

        codes = (kind.grpc_code, kind.http_status)
        assert (Own.grpc_code, Own.http_status) == codes
        assert errors.name_of(Own(1)) == nearest(kind).__name__
        if not issubclass(kind, errors.PromptTooLong):
            assert failure(Own(1), typed=False, anthropic=False)[0] == kind.http_status


@pytest.mark.parametrize("name", ["", "Any", "re", "did_you_mean", "Exception", "OfANewerVersion"])
def test_error_when_restored_from_a_name_of_no_error_then_the_base_class(name: str) -> None:
    assert errors.named(name) is None
    assert type(errors.restore(name, "said")) is ArealError


def test_error_when_restored_then_it_has_its_class_its_message_and_its_attributes(
    classes: list[type[ArealError]],
) -> None:
    for kind in classes:
        got = errors.restore(errors.name_of(made(kind)), "said")
        assert type(got) is nearest(kind)
        assert str(got) == "said"
    too_long = errors.restore("PromptTooLong", "said")
    assert isinstance(too_long, errors.PromptTooLong)
    assert failure(too_long, typed=False, anthropic=True)[0] == 400
