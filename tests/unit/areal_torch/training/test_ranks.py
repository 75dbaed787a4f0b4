"""Two real ranks over gloo: what they tell each other is JSON, and never a pickle."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from areal_launch.processes.process import python_environment

RANK = """
import json, os, pathlib, sys
import torch.distributed as dist
from areal import errors
from areal.protocol.leases import TakenGroup, Take, TakeState
from areal_torch.training import rank_watch
from areal.runs.checkpoints import Checkpoint
from areal_torch.training.rank_watch import RankWatch
from areal_torch.training import ranks as between
from areal_torch.training.ranks import Ranks

def forbidden(*_, **__):
    raise AssertionError("an object collective was called: it pickles")

for name in dir(dist):
    if "_object" in name and callable(getattr(dist, name)):
        setattr(dist, name, forbidden)
        setattr(dist.distributed_c10d, name, forbidden)

rank = int(os.environ["RANK"])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2)
ranks = Ranks(rank, 2)
taken = Take(TakeState.TAKEN, (TakenGroup("e0-7", (3, 4), 2),), "é", replay=True, queued=5)

def only_rank0(value):
    assert rank == 0
    return value

assert ranks.on_rank0(lambda: only_rank0(taken), Take) == taken
shape = tuple[Checkpoint | None, int]
found = (Checkpoint(4, 1, pathlib.Path("/c/step_4-inc_1"), {"dataset": [1, 9]}), 3)
assert ranks.on_rank0(lambda: only_rank0(found), shape) == found
assert ranks.on_rank0(lambda: only_rank0((None, 3)), shape) == (None, 3)
assert ranks.on_rank0(lambda: only_rank0(None)) is None
inner = lambda: ranks.on_rank0(lambda: only_rank0("inner"))
assert ranks.on_rank0(lambda: inner() + " outer") == "inner outer"
assert ranks.on_rank0(lambda: only_rank0(0.25)) == 0.25

def refuse(error):
    raise error

for error in (
    errors.WrongStep("step 9"),
    errors.WaitTimeout("a batch", on="buffer b:1", since=0.0),
    errors.WorkflowError("no reward", "Traceback: line 3"),
):
    try:
        ranks.on_rank0(lambda: refuse(error))
        raise AssertionError("expected an error")
    except errors.ArealError as got:
        assert type(got) is type(error)
        assert str(got) == str(error) or isinstance(error, errors.WaitTimeout)
        assert getattr(got, "traceback", "") == getattr(error, "traceback", "")

class OwnError(errors.InvalidInput):
    pass

try:
    ranks.on_rank0(lambda: refuse(OwnError("no split")))
    raise AssertionError("expected an error")
except errors.InvalidInput as got:
    assert str(got) == "no split"

assert between.gather_json({"rank": rank, "pad": "x" * 1000 * rank}) == [
    {"rank": 0, "pad": ""}, {"rank": 1, "pad": "x" * 1000}
]
between.MAX_BYTES = 100
for call in (between.broadcast_json, between.gather_json):
    try:
        call("x" * 200)
        raise AssertionError("expected a refusal")
    except errors.CapacityExceeded as got:
        assert "202 bytes" in str(got)
between.MAX_BYTES = 1000
rank_watch._connect = lambda: None  # its store is torchrun's
RankWatch._run = lambda self: None
watch = RankWatch(rank, 2)
assert [pid for _, pid in watch._neighbours][rank] == os.getpid()
assert len({pid for _, pid in watch._neighbours}) == 2
dist.barrier()
dist.destroy_process_group()
print("done")
"""


def test_ranks_when_they_tell_each_other_things_then_nothing_is_pickled(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(tmp_path / "rendezvous")],
            env={**python_environment(), "RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=100)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(said)


def test_linter_when_something_would_be_pickled_then_refuses() -> None:
    source = (
        "import pickle\n"
        "import torch.distributed as dist\n"
        "from torch.distributed import all_gather_object\n"
        "dist.broadcast_object_list([])\n"
    )
    root = Path(__file__).parents[4]
    refused = subprocess.run(
        [
            *(sys.executable, "-m", "ruff", "check", "--no-cache", "--output-format", "concise"),
            *("--stdin-filename", "services/areal_torch/engines/x.py", "-"),
        ],
        input=source,
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert refused.stdout.count("TID251") == 3, refused.stdout + refused.stderr
