"""TransferQueue with its simple storage, as `tools/bench/ledger.py` drives it. Not durable.

Runs in an environment of its own. A line of JSON in: {"kib", "batch", "count"}; a line out:
[seconds to put, seconds to get] of `count` rows of one field of `kib` KiB, `batch` at a time.
Clearing what was got is not counted.
"""

from __future__ import annotations

import json
import os
import sys
import time
import uuid


def main() -> None:
    # Ray and its workers write to standard output too.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import ray
    import torch
    import transfer_queue
    from tensordict import TensorDict

    torch.set_num_threads(1)
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    transfer_queue.init()
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        case = json.loads(line)
        batch, count, tag = case["batch"], case["count"], uuid.uuid4().hex
        rows = torch.randint(0, 256, (batch, case["kib"] * 1024), dtype=torch.uint8)
        keys = [[f"{tag}-{i}" for i in range(at, at + batch)] for at in range(0, count, batch)]
        begin = time.perf_counter()
        for each in keys:
            fields = TensorDict({"payload": rows}, batch_size=[batch])
            transfer_queue.kv_batch_put(each, partition_id="train", fields=fields)
        put = time.perf_counter()
        for each in keys:
            got = transfer_queue.kv_batch_get(each, partition_id="train")
            assert got["payload"].shape == rows.shape
        done = time.perf_counter()
        transfer_queue.kv_clear([key for each in keys for key in each], partition_id="train")
        print(json.dumps([put - begin, done - put]), file=answers, flush=True)
    transfer_queue.close()
    ray.shutdown()


if __name__ == "__main__":
    main()
