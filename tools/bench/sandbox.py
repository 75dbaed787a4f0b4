"""Short programs in boxes and through the sandbox service, compared with plain subprocesses.

    python tools/bench/sandbox.py [--programs 400] [--rounds 3]

Each contender runs a Python program that adds two numbers `programs` times, one at a time per core.
`box` uses areal.sandbox (warm). `service` uses areal-sandbox over gRPC, with a new box for
each program. `lease` uses areal-sandbox with one lent box. `subprocess` runs `python -I -c`. They
alternate. The last line is JSON: programs per second of each (medians), and ratios to subprocesses.
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

from tests.service_process import service_process

from areal.clients.sandbox import LentBox, SandboxClient
from areal.sandbox import Outcome, Sandbox

PROGRAM = "print(1 + 1)"


async def boxes(runner: Sandbox | SandboxClient | LentBox, slots: int, programs: int) -> float:
    """Programs per second in boxes."""
    free = asyncio.Semaphore(slots)

    async def one() -> Outcome:
        async with free:
            return await runner.run(PROGRAM)

    began = time.perf_counter()
    found = await asyncio.gather(*[one() for _ in range(programs)])
    assert all(each.stdout == "2\n" for each in found)
    return programs / (time.perf_counter() - began)


async def subprocesses(slots: int, programs: int) -> float:
    """Programs per second, an interpreter for each."""
    free = asyncio.Semaphore(slots)

    async def one() -> bytes:
        async with free:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-c", PROGRAM, stdout=asyncio.subprocess.PIPE
            )
            return (await process.communicate())[0]

    began = time.perf_counter()
    found = await asyncio.gather(*[one() for _ in range(programs)])
    assert set(found) == {b"2\n"}
    return programs / (time.perf_counter() - began)


async def main() -> None:
    """Runs the contenders and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    slots = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        async with service_process("areal_sandbox", Path(folder), "sandbox: {boxes: 1}") as service:
            client, sandbox = SandboxClient(service.listen), Sandbox(slots=slots)
            lent = await client.lend(ttl_s=3600)
            runners = {"box": sandbox, "service": client, "lease": lent}
            rates: dict[str, list[float]] = {name: [] for name in (*runners, "subprocess")}
            for runner in runners.values():
                await boxes(runner, slots, slots)
            for _ in range(arguments.rounds):
                for name, runner in runners.items():
                    rates[name].append(await boxes(runner, slots, arguments.programs))
                rates["subprocess"].append(await subprocesses(slots, arguments.programs))
                print({name: round(each[-1], 1) for name, each in rates.items()}, flush=True)
            await lent.kill()
            await client.close()
            await sandbox.close()
    result = {name: round(statistics.median(each), 1) for name, each in rates.items()}
    ratios = {name: round(result[name] / result["subprocess"], 2) for name in runners}
    print(json.dumps(result | {"ratios": ratios}))


if __name__ == "__main__":
    asyncio.run(main())
