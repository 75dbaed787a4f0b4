r"""What traces cost a rollout worker: CPU of a group of eight samples, with and without them.

    python tools/bench/tracing.py            # a table, then one JSON line

The real executor, workflow and generation client run as in rollout.py, with HTTP to a process that
answers four tokens. A group has 21 spans. The contenders have no traces, every trace, one trace in
a hundred, and every trace while the collector is unreachable. CPU is that of the worker's process,
including its exporting thread. Each figure is the median of several processes, which take turns.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import uvloop

sys.path.insert(0, str(Path(__file__).parents[2] / "services"))
sys.path.insert(0, str(Path(__file__).parents[2]))

import rollout
from tests.otlp_receiver import start_receiver

from areal.chassis import tracing
from areal.protocol.leases import Lease

GROUPS, SAMPLES, CONCURRENT = 512, 8, 64


class _TracedLedger(rollout._Ledger):
    """Its tasks come with the trace of who submitted them."""

    def __init__(self, count: int, data: dict[str, Any]) -> None:
        super().__init__(count, data)
        self._leases = [self._submitted(lease) for lease in self._leases]

    def _submitted(self, lease: Lease) -> Lease:
        span = tracing.start("submit", root=True)
        if span is not None:
            span.end()
        task = dataclasses.replace(lease.task, traceparent=tracing.traceparent(span))
        return dataclasses.replace(lease, task=task, queued_time=time.time())


def one(port: int) -> None:
    """Prints CPU microseconds per group of this process, and nanoseconds of a span not made."""
    rollout._Ledger = _TracedLedger  # what `run_requests` makes

    async def measured() -> float:
        await rollout.run_requests(port, 64, SAMPLES, CONCURRENT)
        return await rollout.run_requests(port, GROUPS, SAMPLES, CONCURRENT)

    with tracing.exporting("areal-bench", "bench/tracing"):
        cost = uvloop.run(measured()) / GROUPS * 1e6
        began = time.thread_time()
        for _ in range(100_000):
            with tracing.span("s"):
                pass
        span = (time.thread_time() - began) * 1e4
    print(json.dumps({"group_us": cost, "span_ns": span}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        one(arguments.one)
        return
    answering = subprocess.Popen(
        [sys.executable, rollout.__file__, "--serve"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert answering.stdout is not None
        port = answering.stdout.readline().strip()
        with start_receiver() as receiver:
            sent = {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.grpc_endpoint}
            cases = {
                "off": {},
                "one trace in a hundred": {
                    **sent,
                    "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
                    "OTEL_TRACES_SAMPLER_ARG": "0.01",
                },
                "every trace": sent,
                "every trace, no collector": {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"},
            }
            found: dict[str, list[dict[str, float]]] = {name: [] for name in cases}
            for _ in range(arguments.repeats):
                for name, environment in cases.items():
                    found[name].append(_measure(port, environment))
    finally:
        answering.kill()
        answering.wait()
    result: dict[str, Any] = {"bench": "tracing", "load": round(os.getloadavg()[0], 1)}
    base = statistics.median(each["group_us"] for each in found["off"])
    print(f"{'traces':28}{'CPU µs a group':>16}{'/ off':>8}{'ns where none is made':>24}")
    for name, runs in found.items():
        cost = statistics.median(each["group_us"] for each in runs)
        span = statistics.median(each["span_ns"] for each in runs)
        result[name] = {"group_us": round(cost, 1), "ratio": round(cost / base, 3)}
        result[name]["span_ns"] = round(span)
        print(f"{name:28}{cost:16.0f}{cost / base:8.2f}{span:24.0f}")
    print(json.dumps(result))


def _measure(port: str, environment: dict[str, str]) -> dict[str, float]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("OTEL_")}
    done = subprocess.run(
        [sys.executable, __file__, "--one", port],
        env={**clean, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        check=True,
    )
    measured: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return measured


if __name__ == "__main__":
    main()
