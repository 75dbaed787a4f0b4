"""What it costs to stream answers; streaming keeps the tokens of a server that dies.

    python tools/bench/streaming.py [--requests 8] [--tokens 1000] [--repeat 3]

The real generation client sends `--requests` requests at once to a real areal_inference server.
Contenders are whole answers, events every 1, 8, … tokens (SGLang's events are cumulative), and our
default. They alternate, and medians of CPU microseconds per token are printed for the client and
for the server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import psutil
import uvloop

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[2] / "services"))

from tests.inference_server import running_server

from areal.types import GenerationHyperparameters, LLMRequest, LLMResponse, StopReason
from areal.weights.servers import InferenceServer, ServerState
from areal_rollout.generation import client as sglang
from areal_rollout.generation.answer import stream_interval
from areal_rollout.generation.protocol import ModelLimits
from areal_rollout.generation.server_table import ServerTable
from areal_torch.models.tiny import VOCAB_SIZE, make_tiny_model


class _Observer:
    def request_done(self, seconds: float, tokens: int) -> None:
        return

    def interruption(self, kind: str) -> None:
        raise AssertionError(kind)

    def salvaged(self, tokens: int) -> None:
        raise AssertionError(tokens)


async def measure(url: str, pid: int, interval: int, options: argparse.Namespace) -> list[float]:
    """CPU microseconds per token: client's, server's."""
    # The client asks this function how to stream.
    sglang.stream_interval = lambda tokens, live: interval  # type: ignore[attr-defined]

    async def report(where: str, cause: str) -> None:
        raise AssertionError(cause)

    client = sglang.SGLangClient(
        ServerTable(),
        ModelLimits(VOCAB_SIZE, 4096),
        report=report,
        observer=_Observer(),
        request_timeout_s=600.0,
        setup_timeout_s=10.0,
    )
    await client.start()
    client.table.update([InferenceServer(url, url, ServerState.SERVING, 0)])
    params = GenerationHyperparameters(max_new_tokens=options.tokens, min_new_tokens=options.tokens)
    server = psutil.Process(pid)
    before, own = sum(server.cpu_times()[:2]), time.process_time()

    async def one() -> None:
        prompt = list(range(5, 25))
        await client.generate(
            LLMRequest(prompt, params), [LLMResponse(prompt, [], [], [], StopReason.ABORT)]
        )

    await asyncio.gather(*[one() for _ in range(options.requests)])
    tokens = options.requests * options.tokens
    spent = [time.process_time() - own, sum(server.cpu_times()[:2]) - before]
    await client.close()
    return [1e6 * seconds / tokens for seconds in spent]


def main() -> int:
    """Prints the table and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    default = stream_interval(options.tokens)
    contenders = {"whole": 0, "every 1": 1, "every 8": 8, f"default, {default}": default}
    costs: dict[str, list[list[float]]] = {name: [] for name in contenders}
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_model(Path(folder) / "model", max_position_embeddings=4096)
        flags = ("--max-running-requests", str(options.requests), "--weight-version", "0")
        with running_server(model, *flags) as server:
            for _ in range(options.repeat):
                for name, interval in contenders.items():
                    cost = uvloop.run(measure(server.url, server.process.pid, interval, options))
                    costs[name].append(cost)
    print(f"{'events':14s} {'client µs/token':>16s} {'server µs/token':>16s}")
    result = {}
    for name, found in costs.items():
        client, engine = (statistics.median(column) for column in zip(*found, strict=True))
        result[name] = {"client_us": round(client, 2), "server_us": round(engine, 2)}
        print(f"{name:14s} {client:16.2f} {engine:16.2f}")
    load = round(os.getloadavg()[0], 1)
    print(json.dumps({"bench": "streaming", "load": load, **result}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
