"""Spans of one process: none where nothing is configured, and no harm from a dead collector.

Each case runs in a process of its own: OpenTelemetry has one provider per process, for good.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
from tests.otlp_receiver import Receiver, start_receiver

SERVICES = Path(__file__).parents[2] / "services"


def run(code: str, **environment: str) -> tuple[Any, float]:
    """Runs Python code in a bare environment: the JSON it printed last, and its seconds."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("OTEL_")}
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**kept, "PYTHONPATH": str(SERVICES), **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), time.monotonic() - start


@pytest.fixture
def receiver() -> Any:
    with start_receiver() as started:
        yield started


ALL = """
    import json, sys
    from areal.chassis import tracing
    with tracing.exporting("areal-test", "experiment/trial"):
        with tracing.span("above", {"areal.task_id": "t"}, root=True) as above:
            sent = tracing.headers()
            with tracing.span("below"):
                tracing.note({"noted": 1})
            kept = tracing.traceparent(above)
        started = tracing.start("later", parent=kept)
        if started is not None:
            started.end()
        with tracing.served("RPC", lambda: [("traceparent", kept)]):
            pass
        with tracing.apart():
            assert tracing.headers() == ()
    made = [above, started]
"""


def test_tracing_when_nothing_is_configured_then_no_sdk_is_imported_and_no_span_made() -> None:
    found, _ = run(
        ALL
        + """
    loaded = [name for name in sys.modules if name.startswith("opentelemetry")]
    print(json.dumps([loaded, made, sent, kept, tracing.enabled()]))
    """
    )
    assert found == [[], [None, None], [], "", False]


def test_tracing_when_another_library_loads_the_sdk_then_still_nothing_is_made() -> None:
    """Redis's client does, for metrics of its own."""
    names = ("buffer", "gateway", "inference", "reward", "rollout", "trainer", "weight_sync")
    found, _ = run(
        f"""
    import {", ".join(f"areal_{name}.server" for name in names)}
    import opentelemetry.sdk.trace
    """
        + ALL
        + """
    print(json.dumps([made, sent, kept]))
    """
    )
    assert found == [[None, None], [], ""]


@pytest.mark.parametrize("value", [{"OTEL_SDK_DISABLED": "true"}, {"OTEL_TRACES_EXPORTER": "none"}])
def test_tracing_when_switched_off_by_a_standard_variable_then_nothing(
    value: dict[str, str],
) -> None:
    end = """
    print(json.dumps([made, "opentelemetry.sdk" in sys.modules]))
    """
    endpoint = "http://127.0.0.1:9"
    assert run(ALL + end, OTEL_EXPORTER_OTLP_ENDPOINT=endpoint, **value)[0] == [[None] * 2, False]


@pytest.mark.parametrize("protocol", ["", "grpc", "http/protobuf"])
def test_tracing_when_configured_then_the_collector_has_all_spans_at_the_end(
    receiver: Receiver, protocol: str
) -> None:
    endpoint = receiver.http_endpoint if protocol == "http/protobuf" else receiver.grpc_endpoint
    run(
        ALL + "\n    print(json.dumps(True))",
        OTEL_EXPORTER_OTLP_ENDPOINT=endpoint,
        OTEL_EXPORTER_OTLP_PROTOCOL=protocol,
        OTEL_RESOURCE_ATTRIBUTES="deployment.environment=test",
    )
    spans = {span.name: span for span in receiver.spans}
    assert sorted(receiver.names()) == ["RPC", "above", "below", "later"]
    above = spans["above"]
    assert above.service == "areal-test"
    assert above.parent_id == ""
    assert above.attributes == {"areal.task_id": "t"}
    assert {span.parent_id for name, span in spans.items() if name != "above"} == {above.span_id}
    assert {span.trace_id for span in spans.values()} == {above.trace_id}
    assert spans["below"].attributes == {"noted": 1}


def test_tracing_when_the_service_has_another_name_then_that_one(receiver: Receiver) -> None:
    end = "\n    print(json.dumps(True))"
    endpoint = {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.grpc_endpoint}
    run(ALL + end, OTEL_SERVICE_NAME="mine", **endpoint)
    run(ALL + end, OTEL_RESOURCE_ATTRIBUTES="service.name=ours", **endpoint)
    assert {span.service for span in receiver.spans} == {"mine", "ours"}


def test_tracing_when_the_root_is_not_sampled_then_no_span_of_that_trace(
    receiver: Receiver,
) -> None:
    end = """
    print(json.dumps([kept, dict(sent)["traceparent"]]))
    """
    [kept, sent], _ = run(
        ALL + end,
        OTEL_EXPORTER_OTLP_ENDPOINT=receiver.grpc_endpoint,
        OTEL_TRACES_SAMPLER="parentbased_traceidratio",
        OTEL_TRACES_SAMPLER_ARG="0",
    )
    assert receiver.names() == []
    assert kept == sent
    assert int(kept[-2:], 16) & 1 == 0, "a process that continues it knows that it is not sampled"


BURST = """
    import json, time
    from areal.chassis import tracing
    start = time.monotonic()
    with tracing.exporting("areal-test", "experiment/trial"):
        for _ in range(5_000):
            with tracing.span("s", root=True):
                pass
        made = time.monotonic() - start
        start = time.monotonic()
    print(json.dumps([made, time.monotonic() - start]))
"""


@pytest.mark.parametrize(
    ("protocol", "kind"),
    [("grpc", "refuses"), ("grpc", "is silent"), ("http/protobuf", "is silent")],
)
def test_tracing_when_the_collector_is_away_then_a_process_ends_in_time(
    protocol: str, kind: str
) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        if kind == "is silent":
            held.listen(64)  # connects, and never answers
        [made, flushed], whole = run(
            BURST,
            OTEL_EXPORTER_OTLP_ENDPOINT=f"http://127.0.0.1:{held.getsockname()[1]}",
            OTEL_EXPORTER_OTLP_PROTOCOL=protocol,
        )
    assert made < 10, "spans that no one takes are dropped, not waited for"
    assert flushed < 9
    assert whole < made + flushed + 30, "nothing of it keeps the interpreter from ending"


@pytest.mark.parametrize(
    ("value", "line"),
    [
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "collector:4317"},
            "OTEL_EXPORTER_OTLP_ENDPOINT 'collector:4317': expected http://host:port or "
            "https://host:port",
        ),
        (
            {
                "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://collector:4317",
                "OTEL_EXPORTER_OTLP_PROTOCOL": "http/json",
            },
            "OTEL_EXPORTER_OTLP_PROTOCOL 'http/json': expected grpc or http/protobuf",
        ),
    ],
)
def test_tracing_when_the_environment_is_wrong_then_one_line(
    value: dict[str, str], line: str
) -> None:
    code = """
    import json
    from areal.errors import ConfigError
    from areal.chassis import tracing
    try:
        with tracing.exporting("areal-test", "experiment/trial"):
            pass
    except ConfigError as error:
        print(json.dumps(str(error)))
    """
    assert run(code, **value)[0] == line
