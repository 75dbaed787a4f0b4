"""TransferQueue with its simple storage, as `tools/bench/ledger.py` drives it. Not durable.

Runs in an environment of its own. A line of JSON in: {"kib", "batch", "count", "together"}; a line
out: seconds to put and get `count` rows of one field of `kib` KiB, `batch` at a time. With
`together` 1 each batch is put, then got; else so many are put and so many got at any time, by its
asynchronous calls, and who gets hears at no cost that a batch is there. Clearing what was got is
not counted.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
import uuid
from typing import Any


async def run(case: dict[str, Any]) -> float:
    import torch
    import transfer_queue
    from tensordict import TensorDict

    batch, count, together = case["batch"], case["count"], case["together"]
    tag = uuid.uuid4().hex
    rows = torch.randint(0, 256, (batch, case["kib"] * 1024), dtype=torch.uint8)
    batches = [[f"{tag}-{i}" for i in range(at, at + batch)] for at in range(0, count, batch)]
    waiting, there = iter(batches), asyncio.Queue[list[str]]()

    async def put(keys: list[str]) -> None:
        fields = TensorDict({"payload": rows}, batch_size=[batch])
        await transfer_queue.async_kv_batch_put(keys, partition_id="train", fields=fields)

    async def get(keys: list[str]) -> None:
        got = await transfer_queue.async_kv_batch_get(keys, partition_id="train")
        assert len(got["payload"].unbind()) == batch  # a nested tensor

    async def write() -> None:
        for keys in waiting:
            await put(keys)
            there.put_nowait(keys)

    async def read(times: int) -> None:
        for _ in range(times):
            await get(await there.get())

    begin = time.perf_counter()
    if together == 1:
        for keys in batches:
            await put(keys)
            await get(keys)
    else:
        shares = [len(batches[start::together]) for start in range(together)]
        await asyncio.gather(*(write() for _ in range(together)), *(map(read, shares)))
    seconds = time.perf_counter() - begin
    await transfer_queue.async_kv_clear([key for each in batches for key in each], "train")
    return seconds


def main() -> None:
    # Ray and its workers write to standard output too.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import ray
    import torch
    import transfer_queue

    torch.set_num_threads(1)
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    transfer_queue.init()
    print("ready", file=answers, flush=True)
    with asyncio.Runner() as runner:
        for line in sys.stdin:
            print(json.dumps(runner.run(run(json.loads(line)))), file=answers, flush=True)
    transfer_queue.close()
    ray.shutdown()


if __name__ == "__main__":
    main()
