"""Ranks of test_mesh_groups.py: `python mesh_worker.py FILE ABSENT` makes a mesh of d2t2.

FILE is where the ranks meet. ABSENT joins the job and never makes the mesh; -1: all do. Prints what
each of the others met, as JSON. They are forks of a process that has imported everything.
"""

import json
import multiprocessing
import os
import sys

import torch
import torch.distributed as dist

from areal.errors import WaitTimeout
from areal_torch.engines.parallel.mesh import make_mesh

LIMIT_S = 3.0


def made():
    cpu = torch.device("cpu")
    try:
        mesh = make_mesh("d2t2", cpu, LIMIT_S)
    except WaitTimeout as error:
        return {"error": str(error)}
    groups = [mesh.data_group, mesh.shards.get_group(), mesh.tensor.get_group()]
    limits = [group._get_backend(cpu).options._timeout.total_seconds() for group in groups]
    sums = []
    for group in groups:
        number = torch.tensor([float(dist.get_rank())])
        dist.all_reduce(number, group=group)
        sums.append(number.item())
    return {"limits_s": limits, "sums": sums}


def run(number, file, pipe, others):
    for other in others:
        other.close()
    store = dist.FileStore(file, 4)
    dist.init_process_group("gloo", store=store, rank=number, world_size=4)
    if number != int(sys.argv[2]):
        pipe.send_bytes(json.dumps(made()).encode())
    pipe.recv_bytes()  # when the others have answered
    os._exit(0)  # a group that is half connected waits at its end


if __name__ == "__main__":
    torch.set_num_threads(1)
    fork = multiprocessing.get_context("fork")
    pipes = [fork.Pipe() for _ in range(4)]
    ranks = [
        fork.Process(
            target=run,
            args=(n, sys.argv[1], pipes[n][1], [pipe[0] for pipe in pipes]),
            daemon=True,
        )
        for n in range(4)
    ]
    for rank in ranks:
        rank.start()
    found = {}
    for n, (ours, _) in enumerate(pipes):
        if n != int(sys.argv[2]):
            assert ours.poll(120), f"rank {n} has not answered within 120 s"
            found[n] = json.loads(ours.recv_bytes())
    print(json.dumps(found))
    for rank, (ours, _) in zip(ranks, pipes, strict=True):
        ours.send_bytes(b"over")
        rank.join(30)
