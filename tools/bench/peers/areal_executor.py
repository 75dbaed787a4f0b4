"""AReaL's WorkflowExecutor over an engine that answers nothing, for `tools/bench/rollout.py`.

Runs in an environment of its own. A line of JSON in: {"concurrent", "seconds", "count"}; a line
out: CPU seconds of this process until `count` episodes of that length have been waited for.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from typing import Any


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import torch
    from areal.api import RolloutWorkflow
    from areal.api.cli_args import InferenceEngineConfig
    from areal.infra.workflow_executor import WorkflowExecutor

    torch.set_num_threads(1)

    class Engine:
        def get_version(self) -> int:
            return 0

    class Waiting(RolloutWorkflow):
        def __init__(self, seconds: float) -> None:
            self.seconds = seconds
            self.trajectory = {
                "input_ids": torch.tensor([[1, 2, 3, 4, 5]]),
                "attention_mask": torch.ones(1, 5, dtype=torch.bool),
                "rewards": torch.tensor([1.0]),
            }

        async def arun_episode(self, engine: Any, data: dict[str, Any]) -> dict[str, Any]:
            await asyncio.sleep(self.seconds)
            return self.trajectory

    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        case = json.loads(line)
        # No admission bound within the count: the cost of running is measured, not a gate.
        executor = WorkflowExecutor(
            InferenceEngineConfig(
                max_concurrent_rollouts=case["concurrent"],
                consumer_batch_size=case["concurrent"],
                max_head_offpolicyness=1_000_000,
                queue_size=case["count"] + 1,
            ),
            Engine(),
        )
        executor.initialize(train_data_parallel_size=1)
        workflow = Waiting(case["seconds"])
        cpu = time.process_time()
        for number in range(case["count"]):
            executor.submit({"number": number}, workflow)
        executor.wait(case["count"], timeout=300)
        spent = time.process_time() - cpu
        executor.destroy()
        print(json.dumps(spent), file=answers, flush=True)


if __name__ == "__main__":
    main()
