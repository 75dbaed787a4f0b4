"""Short programs in boxes against plain subprocesses, on the same cores.

    python tools/bench/sandbox.py [--programs 400] [--rounds 3]

Both run `programs` times a Python program that adds two numbers, one at a time for each core:
`box` in areal.rewards.sandbox (warm), `subprocess` as `python -I -c`. They alternate. The last line
is JSON: programs per second of each (medians) and the ratio, boxes over subprocesses.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import time

from areal.rewards.sandbox import Sandbox

PROGRAM = "print(1 + 1)"


async def boxes(sandbox: Sandbox, programs: int) -> float:
    """Programs per second in boxes."""
    began = time.perf_counter()
    found = await asyncio.gather(*[sandbox.run(PROGRAM) for _ in range(programs)])
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
    """Run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    slots = len(os.sched_getaffinity(0))
    sandbox = Sandbox(slots=slots)
    await boxes(sandbox, slots)
    rates: dict[str, list[float]] = {"box": [], "subprocess": []}
    for _ in range(arguments.rounds):
        rates["box"].append(await boxes(sandbox, arguments.programs))
        rates["subprocess"].append(await subprocesses(slots, arguments.programs))
        print({name: round(each[-1], 1) for name, each in rates.items()}, flush=True)
    await sandbox.close()
    result = {name: round(statistics.median(each), 1) for name, each in rates.items()}
    print(json.dumps(result | {"ratio": round(result["box"] / result["subprocess"], 2)}))


if __name__ == "__main__":
    asyncio.run(main())
