"""Weights from a trainer's memory into the parameters of 1 and 4 servers, by each transport.

    python tools/bench/weight_sync.py [--megabytes 500] [--rounds 5] [--servers 1 4]

Each server is a process with areal-inference's loader. A weight store serves in a thread of this
process. The contender is what people do by hand: save safetensors, then load them and copy them
into parameters. Both alternate in the same run. Figures are medians; `blocked` is the time that the
trainer waits (`distributed` also stores). Then deltas are measured: size and time by share of
changed elements, or between two versions given by --versions FOLDER FOLDER. With
`--objects s3://bucket/prefix`, an object store that the environment can reach (moto_server and
AWS_ENDPOINT_URL) is measured instead of groups and deltas.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import shutil
import statistics
import tempfile
import threading
import time
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from areal.security import Security
from areal.weights import delta
from areal.weights.broadcast import DTYPES, Offer, Seats
from areal.weights.delta import DeltaChain
from areal.weights.manifest import PolicyVersion
from areal.weights.objects import ObjectPublisher, ObjectStore
from areal.weights.publisher import NewVersion, Publisher
from areal.weights.safetensors import HostTensor, item_bytes
from areal_torch.publish.disk import DiskPublisher
from areal_torch.publish.stream import StreamPublisher

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 1024,
    "intermediate_size": 2816, "num_attention_heads": 16, "num_key_value_heads": 8,
    "vocab_size": 8192, "max_position_embeddings": 1024, "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu",
}  # fmt: skip


def make_tensors(megabytes: int, model: Path) -> dict[str, Any]:
    """A Qwen2's tensors of about that size in float32, and its config.json."""
    import torch

    from areal_inference.model.config import ModelConfig
    from areal_inference.model.weights import model_shapes

    model.mkdir()
    layers = 1
    while True:
        (model / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": layers}))
        shapes = model_shapes(ModelConfig.from_folder(model))
        if sum(int(np.prod(s)) * 4 for s in shapes.values()) >= megabytes * 1e6:
            break
        layers += 1
    generator = torch.Generator().manual_seed(0)
    return {n: 0.02 * torch.randn(s, generator=generator) for n, s in shapes.items()}


def server(pipe: Connection, model: str) -> None:
    """A server's process: loads what it is told, into the set it does not use."""
    import torch

    from areal_inference.http_api.weight_groups import Groups
    from areal_inference.model.config import ModelConfig
    from areal_inference.model.weights import load_weights

    torch.set_num_threads(1)
    config, sets = ModelConfig.from_folder(Path(model)), [None, None]
    plain: dict[str, Any] = {}
    groups = Groups(config)
    while True:
        kind, location = pipe.recv()
        if kind == "stop":
            return
        if kind == "safetensors":
            from safetensors.torch import load_file

            for name, tensor in load_file(location).items():
                plain.setdefault(name, torch.empty_like(tensor)).copy_(tensor)
            pipe.send(time.perf_counter())
            continue
        source = None
        if kind == "distributed":
            source = asyncio.run(_receive(groups, *location))
            location = groups.location()
        new = load_weights(
            location, config, torch.float32, spare=sets[1], held=sets[0], source=source
        )
        sets = [new, sets[0]]
        pipe.send(time.perf_counter())


async def _receive(groups: Any, seat: dict[str, Any] | None, names: dict[str, Any]) -> Any:
    """What areal-inference does when it is told to: joins if the group is new, takes part."""
    from areal_inference.http_api.weight_groups import MemorySource

    if seat is not None:
        await groups.join(seat)
    source = MemorySource()
    await groups.receive(names, source)
    return source


class Servers:
    """Processes that stand for servers."""

    def __init__(self, count: int, model: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipes, self.processes = [], []
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=server, args=(theirs, str(model)), daemon=True)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)

    def tell(self, kind: str, location: str) -> float:
        """Has all of them load at once; see `wait`."""
        for pipe in self.pipes:
            pipe.send((kind, location))
        return self.wait()

    def wait(self) -> float:
        """Waits until each has loaded; returns when the last one had, by `time.perf_counter`."""
        return max(float(pipe.recv()) for pipe in self.pipes)

    def stop(self) -> None:
        """Ends the processes of all servers."""
        for pipe in self.pipes:
            pipe.send(("stop", ""))

    def seat(self, manifest: PolicyVersion, offer: Offer) -> Seats:
        """Answers an offer as weight-sync does: all take part, over the same group as before."""
        seats = Seats(offer.group or f"bench-{offer.port}", len(self.pipes) + 1)
        names = {
            "names": [t.name for t in manifest.tensors],
            "dtypes": [DTYPES[t.dtype] for t in manifest.tensors],
            "shapes": [list(t.shape) for t in manifest.tensors],
            "digests": [t.digest for t in manifest.tensors],
            "group_name": seats.group,
        }
        for number, pipe in enumerate(self.pipes):
            seat = {
                "master_address": offer.address, "master_port": offer.port,
                "rank_offset": number + 1, "world_size": seats.world_size,
                "group_name": seats.group, "backend": offer.backend,
            }  # fmt: skip
            pipe.send(("distributed", (None if offer.group else seat, names)))
        return seats


def start_store(root: Path, model: Path) -> str:
    """The weight store in a thread; returns its url."""
    import socket

    from areal_weight_sync.store.http import StoreApp
    from areal_weight_sync.store.weights import WeightStore

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ready = threading.Event()

    def run() -> None:
        async def serve() -> None:
            app = StoreApp(WeightStore(root, model), list, lambda: None, Security())
            await app.start("127.0.0.1", port)
            ready.set()
            await asyncio.Event().wait()

        asyncio.run(serve())

    threading.Thread(target=run, daemon=True).start()
    ready.wait(30)
    return f"http://127.0.0.1:{port}"


def bench_transports(args: argparse.Namespace, root: Path) -> None:
    import torch
    from safetensors.torch import save_file

    from areal_torch.engines.export.publishing import host_tensors
    from areal_torch.publish.distributed import DistributedPublisher

    torch.set_num_threads(1)
    model = root / "model"
    tensors = make_tensors(args.megabytes, model)
    host = host_tensors(tensors.items())
    size = sum(t.data.nbytes for t in host) / 1e6
    memory = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="areal-bench-"))
    url = start_store(root / "store", model)
    publishers: dict[str, Publisher] = {
        "disk": DiskPublisher(root / "disk"),
        "disk in memory": DiskPublisher(memory),
        "stream": StreamPublisher(url, Security(), 60.0),
    }
    if args.objects:
        publishers["object store"] = ObjectPublisher(args.objects)
    folders = {
        "disk": root / "disk",
        "disk in memory": memory,
        "stream": root / "store",
        "distributed": root / "stored",
    }
    print(f"{size:.0f} MB, load {os.getloadavg()[0]:.1f}, medians of {args.rounds} rounds")
    try:
        for count in args.servers:
            servers = Servers(count, model)
            times: dict[str, list[tuple[float, float]]] = {}
            if not args.objects:
                publishers["distributed"] = DistributedPublisher(
                    DiskPublisher(root / "stored"), servers.seat, root / "stored", "127.0.0.1:1"
                )
            for number in range(1, args.rounds + 2):  # the first warms up
                for name in ("safetensors", *publishers):
                    begin = time.perf_counter()
                    if name == "safetensors":
                        file = root / "by-hand.safetensors"
                        save_file(tensors, file)
                        blocked = time.perf_counter() - begin
                        ended = servers.tell(name, str(file))
                    else:
                        new = NewVersion(count * 1000 + number, 1, host, model)
                        version = publishers[name].publish(new, lambda _: None)
                        blocked = time.perf_counter() - begin
                        where = version.path
                        if name == "stream":
                            where = f"{url}/versions/{new.name}"
                        # What was broadcast is there by now, perhaps before it was stored.
                        ended = (
                            servers.wait() if name == "distributed" else servers.tell(name, where)
                        )
                    if number > 1:
                        times.setdefault(name, []).append((ended - begin, blocked))
                    if name == "object store":
                        ObjectStore(args.objects).delete(new.name)
                    elif name != "safetensors":
                        retire(folders[name], Path(version.path))
            if not args.objects:
                bench_chains(args, servers, count, model, tensors, (root, url), times)
            servers.stop()
            bound = statistics.median(t for t, _ in times["safetensors"])
            for name, found in times.items():
                total = statistics.median(t for t, _ in found)
                blocked = statistics.median(b for _, b in found)
                print(
                    f"{count} server{'s' if count > 1 else ' '}  {name:15} {total:6.3f} s "
                    f"{total / bound:5.2f} of save+load   blocked {blocked:6.3f} s",
                    flush=True,
                )
    finally:
        shutil.rmtree(memory)


def bench_chains(
    args: argparse.Namespace,
    servers: Servers,
    count: int,
    model: Path,
    tensors: dict[str, Any],
    where: tuple[Path, str],
    times: dict[str, list[tuple[float, float]]],
) -> None:
    """Versions of which 3 % of the elements change, to servers that hold the one before."""
    import torch

    from areal_torch.engines.export.publishing import host_tensors
    from areal_weight_sync.versions import DigestCache

    root, url = where
    generator = torch.Generator().manual_seed(1)
    other = {
        name: t + 1e-5 * (torch.rand(t.shape, generator=generator) < 0.03)
        for name, t in tensors.items()
    }
    hosts = [host_tensors(tensors.items()), host_tensors(other.items())]
    for name in ("disk delta", "stream delta"):
        publisher: Publisher = StreamPublisher(url, Security(), 60.0, chain=DeltaChain())
        folder = root / "store"
        if name == "disk delta":
            folder = root / "disk"
            publisher = DiskPublisher(folder, chain=DeltaChain())
        earlier: list[Path] = []
        for number in range(1, args.rounds + 3):  # a whole one, one that warms up
            begin = time.perf_counter()
            new = NewVersion(count * 2000 + number, 1, hosts[number % 2], model)
            version: PolicyVersion = publisher.publish(new, DigestCache().verify)
            blocked = time.perf_counter() - begin
            pulled = f"{url}/versions/{new.name}"
            ended = servers.tell(name, version.path if name == "disk delta" else pulled)
            if number > 2:
                assert version.delta is not None
                times.setdefault(name, []).append((ended - begin, blocked))
            earlier.append(Path(version.path))
            if len(earlier) > 1:
                retire(folder, earlier.pop(0))


def retire(root: Path, folder: Path) -> None:
    """What garbage collection does with the version before."""
    if (root / ".spare").exists():
        shutil.rmtree(folder)
    else:
        folder.rename(root / ".spare")


def bench_delta(megabytes: int) -> None:
    elements = megabytes * 250_000
    rng = np.random.default_rng(0)
    base = (0.02 * rng.standard_normal(elements)).astype(np.float32)
    for dtype in ("BF16", "F32"):
        for share in (0.01, 0.03, 0.1, 1.0):
            chosen = rng.random(elements) < share
            if dtype == "BF16":
                before = (base.view(np.uint32) >> 16).astype(np.uint16)
                after = before.copy()
                after[chosen] += rng.choice([-1, 1], int(chosen.sum())).astype(np.int16).view("u2")
            else:
                before, after = base, base.copy()
                after[chosen] += (1e-5 * rng.standard_normal(int(chosen.sum()))).astype(np.float32)
            tensor = HostTensor("w", (elements,), dtype, memoryview(after).cast("B"))
            report(f"{dtype} {share:6.1%} changed", [tensor], {"w": memoryview(before).cast("B")})


def report(name: str, new: list[HostTensor], base: dict[str, Any]) -> None:
    begin = time.perf_counter()
    raw = delta.encode(new, base, "")
    seconds = time.perf_counter() - begin
    size = sum(t.data.nbytes for t in new)
    if raw is None:
        print(f"delta {name}: does not pay ({seconds:.2f} s to see)", flush=True)
        return
    found = delta.Delta(raw)
    copies = {t.name: bytearray(base[t.name]) for t in new}
    begin = time.perf_counter()
    for tensor in new:
        found.apply(tensor.name, tensor.dtype, memoryview(copies[tensor.name]))
    took = time.perf_counter() - begin
    assert all(bytes(copies[t.name]) == bytes(t.data) for t in new)
    print(
        f"delta {name}: {len(raw) / size:.4f} of {size / 1e6:.1f} MB, encoded in {seconds:.2f} s, "
        f"applied in {took:.2f} s",
        flush=True,
    )


def _cast(tensor: Any, dtype: str) -> Any:
    return tensor.bfloat16() if dtype == "bfloat16" else tensor


def bench_versions(folders: list[Path]) -> None:
    """A real step: two published versions of a run, as they are and in bfloat16."""
    from safetensors.torch import load_file

    from areal_torch.engines.export.publishing import host_tensors

    old, new = (load_file(folder / "model.safetensors") for folder in folders)
    for dtype in ("as stored", "bfloat16"):
        cast = partial(_cast, dtype=dtype)
        before = {t.name: t.data for t in host_tensors((n, cast(t)) for n, t in old.items())}
        after = list(host_tensors((n, cast(t)) for n, t in new.items()))
        size = sum(t.data.nbytes // item_bytes(t.dtype) for t in after)
        raw = delta.encode(after, before, "")
        share = f"{delta.Delta(raw).changed() / size:.1%}" if raw else "most elements"
        report(f"of a real step, {dtype}, {share} changed", after, before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--servers", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--objects", default="", help="{s3,gs,az}://bucket/prefix.")
    parser.add_argument("--versions", type=Path, nargs=2, help="Folders of two published versions.")
    args = parser.parse_args()
    if args.versions:
        bench_versions(args.versions)
        return
    with tempfile.TemporaryDirectory(prefix="areal-bench-") as folder:
        bench_transports(args, Path(folder))
    if not args.objects:
        bench_delta(args.megabytes // 5)


if __name__ == "__main__":
    main()
