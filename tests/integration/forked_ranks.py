"""Ranks (gloo) that are forks of one process, which has imported everything.

Imports take most of the time of models as small as those of tests; torchrun imports torch once more
for itself.
"""

import multiprocessing
import os
import sys
from multiprocessing.connection import wait
from pathlib import Path

from areal.chassis.collector import collector_paused

with collector_paused():
    import torch
    import torch.distributed as dist

    # Each rank would import these by itself, with its first model: for two seconds of CPU.
    import transformers.models.qwen2.modeling_qwen2  # noqa: F401
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText  # noqa: F401


def run_launches(folder, launches, run):
    """Runs the jobs of each launch in turn, then exits with a line if a rank failed.

    Args:
        folder: Where ranks meet.
        launches: [ranks, jobs], …; 0 ranks: a process that joins no group.
        run: Called with each job, on every rank.
    """
    torch.set_num_threads(1)
    forking = multiprocessing.get_context("fork")
    for number, (ranks, jobs) in enumerate(launches):
        meet = str(Path(folder) / f"meet-{os.getpid()}-{number}")
        forks = [
            forking.Process(target=_rank_of, args=(rank, ranks, meet, jobs, run), daemon=True)
            for rank in range(ranks or 1)
        ]
        for each in forks:
            each.start()
        wait([each.sentinel for each in forks if each.is_alive()])
        for each in forks:
            each.join(60 if any(other.exitcode for other in forks) else None)
        if any(each.exitcode for each in forks):
            sys.exit(f"ranks of {ranks} ended with {[each.exitcode for each in forks]}")


def _rank_of(rank, world, meet, jobs, run):
    if world:
        store = dist.FileStore(meet, world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    for each in jobs:
        run(each)
    if dist.is_initialized():
        dist.destroy_process_group()
