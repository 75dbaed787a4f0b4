"""What each torchrun rank of test_export_torchrun.py does; argument: a JSON object {model, out}.

Rank 0 writes `out`: what the test asserts.
"""

import json
import sys
import threading
import time
from contextlib import ExitStack, closing
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from tests.unit.areal_torch.engines.train_fixtures import make_batch, weighted_loss
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from areal.config.training import OptimizerConfig, TrainEngineConfig
from areal_torch.engines.export import buckets
from areal_torch.engines.export.exporter import Exporter
from areal_torch.engines.fsdp import FSDPEngine
from areal_torch.engines.model import hub_names
from areal_torch.engines.model.source import load_model
from areal_torch.engines.parallel.mesh import join_process_group, local_device
from areal_torch.training.ranks import gather_json


class Largest(TorchDispatchMode):
    """Elements of the largest tensor, and bytes of the largest buffer, that this thread makes."""

    elements, buffer = 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dtype == torch.uint8:
            self.buffer = max(self.buffer, result.nbytes)
        elif isinstance(result, torch.Tensor) and not hasattr(result, "to_local"):
            self.elements = max(self.elements, result.numel())
        return result


def gathered(engine, dtype):
    """(tensors on rank 0, elements of each rank's largest tensor, bytes that rank 1 sends)."""
    work = engine.exporter.gathering(dtype)
    sent = sum(bucket.sizes.get(1, 0) for bucket in work._buckets)
    with Largest() as largest:
        tensors = {name: t.clone() for bucket in work.buckets() for name, t in bucket}
    return tensors, gather_json([largest.elements, largest.buffer]), sent


def layouts(model):
    """Whether pieces of any layout make the tensors that were distributed."""
    hf = load_model(model, torch.float32, from_scratch=False, seed=0)
    live = {name: t.detach().clone() for name, t in hub_names.live_tensors(hf).items()}
    steps = hub_names.export_steps(hf)
    expected = dict(pair for step in steps for pair in step.run(hf, map(live.get, step.names)))
    mesh = init_device_mesh("cpu", (2, 1))
    other = init_device_mesh("cpu", (1, 2))
    kinds = [
        (mesh, [Shard(0), Replicate()]),
        (mesh, [Replicate(), Shard(0)]),
        (other, [Replicate(), Shard(0)]),
        (other, [Shard(0), Shard(0)]),
        (other, [Replicate(), Shard(1)]),
        (mesh, [Shard(1), Shard(0)]),
    ]
    for number, (name, parameter) in enumerate(list(hf.named_parameters())):
        where, placements = kinds[number % len(kinds)]
        if parameter.dim() == 1:
            placements = [Shard(0) if p.is_shard() else p for p in placements]
        owner, _, own = name.rpartition(".")
        spread = distribute_tensor(parameter.detach(), where, placements)
        setattr(hf.get_submodule(owner), own, torch.nn.Parameter(spread))
    hf.tie_weights()
    exporter = Exporter(hf, Path(model), local_device(), 60.0)
    found = dict(pair for b in exporter.gathering(None).buckets() for pair in b)
    if dist.get_rank() != 0:
        return not found
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], tensor) for name, tensor in expected.items()
    )


def twice(engine, held):
    """What is gathered again while a step wants to change it; then not at all, or a part."""
    told, again = [], []

    def broadcast(tensors, repeat):
        time.sleep(1.0)  # servers join; the step is at its optimizer meanwhile
        told.extend(tensor.name for tensor in tensors)
        with closing(repeat.buckets()) as gathering:
            again.extend((name, tensor.clone()) for bucket in gathering for name, tensor in bucket)

    def breaks(_, repeat):
        with closing(repeat.buckets()) as gathering:
            next(gathering)

    done = engine.export("float32", broadcast, twice=True)
    engine.train_batch(make_batch(dist.get_rank()), weighted_loss)
    done.result(timeout=60)
    for deliver in (breaks, lambda _, repeat: repeat.skip(), lambda *_: None):
        engine.export("float32", deliver, twice=True).result(timeout=60)
    changed, _, _ = gathered(engine, "float32")
    return {
        "in order": bool(told) and [name for name, _ in again] == told,
        "same": all(torch.equal(held[name], tensor) for name, tensor in again),
        "changed since": any(not torch.equal(held[name], changed[name]) for name in held),
    }


def order(engine):
    """What the training thread launches, in order, of an export that gathers in order."""
    launched, main = [], threading.get_ident()
    # Those of FSDP have other names in other releases of torch.
    gathers = ("all_gather_into_tensor", "all_gather_single")
    patched = [(buckets, "_exchange"), *((dist, each) for each in gathers if hasattr(dist, each))]

    def noting(name, real):
        def run(*args, **kwargs):
            launched.append(name if threading.get_ident() == main else f"{name} in a thread")
            return real(*args, **kwargs)

        return run

    with ExitStack() as stack:
        for owner, name in patched:
            made = noting(name.strip("_"), getattr(owner, name))
            stack.enter_context(mock.patch.object(owner, name, made))
        engine.exporter._in_order = True
        told = []
        done = engine.export("float32", lambda *given: told.append(given), twice=True)
        engine.train_batch(make_batch(dist.get_rank()), weighted_loss)
        done.result(timeout=60)
        engine.exporter._in_order = False
    return {"launched": launched, "delivered": [[len(t), again is None] for t, again in told]}


def run(model, out):
    buckets.BUCKET_BYTES = 40_960
    optimizer = OptimizerConfig(lr=1e-2)
    engine = FSDPEngine(TrainEngineConfig(path=model, dtype="float32", optimizer=optimizer))
    engine.initialize()
    before, largest, wide = gathered(engine, "float32")
    _, _, narrow = gathered(engine, "bfloat16")

    # An export that begins before a train step holds what the weights were then, and neither the
    # step nor any other rank waits for the one who takes it over.
    free, delivered = threading.Event(), []

    def deliver(tensors, _):
        assert free.wait(60), "the step has waited for the delivery"
        delivered.extend(tensors)

    done = engine.export("float32", deliver)
    engine.train_batch(make_batch(dist.get_rank()), weighted_loss)
    ended_early = done.done()
    free.set()
    done.result(timeout=60)
    after, _, _ = gathered(engine, "float32")
    again = twice(engine, after)
    ordered = gather_json(order(engine))
    whole = {name: tensor.numel() for name, tensor in before.items()}
    same = {t.name: bytes(t.data) == before[t.name].numpy().tobytes() for t in delivered}
    digests = all(t.known_digest for t in delivered)
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    results = gather_json({"layouts": layouts(model), "done_before_delivery": ended_early})
    if dist.get_rank() == 0:
        report = {
            "largest_tensor": max(whole.values()),
            "names": sorted(whole),
            "largest_by_rank": largest,
            "bytes_sent": [wide, narrow],
            "delivered": same,
            "digests": digests,
            "changed": len(changed),
            "again": again,
            "ordered": ordered,
            "ranks": results,
        }
        Path(out).write_text(json.dumps(report))
    engine.destroy()


if __name__ == "__main__":
    torch.set_num_threads(1)
    join_process_group(local_device(), timeout_seconds=60)
    run(**json.loads(sys.argv[1]))
    dist.destroy_process_group()
