"""Peak memory of rank 0 of 8 and of 32 GPUs, by a train step whose tensors have no memory.

    config.json -> model on the meta device -> the trainer's own layout, recomputing, heads,
    optimizer -> forward, backward, AdamW over fake tensors -> the largest sum of live storages

Collectives are those of torch's fake process group: they allocate their buffers and move nothing.
Every storage that an operator makes is counted while it lives. The CUDA context and memory that an
allocator loses to fragmentation are not counted. Attention is the `packed` kernel of a CPU, which
makes one more copy of queries, keys and values than that of a GPU. Experts get equal numbers of
tokens.

PYTHONPATH=services:. python tools/bench/memory.py [MODEL]     prints rows of a Markdown table
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from areal import memory_estimate as estimate
from areal.config.allocation import Layout
from areal.config.training import MicroBatchSpec, TrainEngineConfig
from areal_torch.algorithms import packing
from areal_torch.algorithms.losses import sft_loss
from areal_torch.engines.model import source
from areal_torch.engines.model.attention.layout import build_layout
from areal_torch.engines.model.heads import LogprobHead
from areal_torch.engines.model.packed import PackedCausalLM
from areal_torch.engines.optimizer import make_optimizer
from areal_torch.engines.parallel import memory
from areal_torch.engines.parallel.apply import parallelize, resolve_precision
from areal_torch.engines.parallel.mesh import make_mesh

GIB = 2**30
SHAPES = Path(__file__).resolve().parents[2] / "tools/gpu/shapes"
TOKENS, LENGTH = 16384, 1024
# For each model and number of ranks.
CASES = [
    ("qwen2.5-7b", "d8", "none"),
    ("qwen2.5-7b", "d8", "selective"),
    ("qwen2.5-7b", "d8", "full"),
    ("qwen2.5-7b", "d32", "selective"),
    ("qwen2.5-7b", "d32s8", "full"),
    ("qwen3-8b", "d8", "selective"),
    ("qwen3-8b", "d8", "full"),
    ("qwen3-8b", "d4c2", "selective"),
    ("qwen3-8b", "d32", "selective"),
    ("qwen3-30b-a3b", "d8", "full"),
    ("qwen3-30b-a3b", "d8e8", "full"),
    ("qwen3-30b-a3b", "d32", "full"),
    ("qwen3-30b-a3b", "d32e8", "full"),
    ("qwen3-30b-a3b", "d32e8", "selective"),
]


class Peak(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the storages that live, and keeps the largest sum."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = operator(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.count(leaf)
        return result

    @contextmanager
    def resizes(self) -> Iterator[None]:
        """See FSDP take a storage's memory away, and return it: that is no operator."""
        real = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> None:
            real(storage, size)
            if storage._cdata in self._sizes:
                self._note(storage)

        with mock.patch.object(torch.UntypedStorage, "resize_", resize):
            yield

    def count(self, tensor: Tensor) -> None:
        """Notes a tensor's storage, or its new size."""
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        if storage._cdata not in self._sizes:
            weakref.finalize(storage, self._drop, storage._cdata)
        self._note(storage)

    def _note(self, storage: torch.UntypedStorage) -> None:
        size = storage.nbytes()
        self.now += size - self._sizes.get(storage._cdata, 0)
        self._sizes[storage._cdata] = size
        self.most = max(self.most, self.now)

    def _drop(self, key: int) -> None:
        self.now -= self._sizes.pop(key)


@contextmanager
def even_shares(pairs: int, layout: Layout) -> Iterator[None]:
    """Answers what depends on values: ranks of experts, and of a context, get equal shares."""
    real = torch.nonzero

    def tolist(tensor: FakeTensor) -> Any:
        assert tensor.shape == (2, layout.experts), tensor.shape
        return [[pairs // layout.experts] * layout.experts] * 2

    def nonzero(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, FakeTensor):
            return real(tensor)
        return tensor.new_zeros(len(tensor) // layout.context, 1, dtype=torch.int64)

    with (
        mock.patch.object(FakeTensor, "tolist", tolist),
        mock.patch.object(torch, "nonzero", nonzero),
    ):
        yield


def measure(path: Path, layout: str, mode: str, tokens: int, length: int) -> dict[str, Any]:
    """Bytes at the peak of a second train step of rank 0, and what was estimated."""
    plan = Layout.parse(layout)
    dist.init_process_group("fake", rank=0, world_size=plan.ranks)
    config: Any = TrainEngineConfig(
        path=str(path),
        dtype="bfloat16",
        layout=layout,
        gradient_checkpointing=cast("Any", mode),
        mb_spec=MicroBatchSpec(max_tokens_per_mb=tokens),
    )
    device = torch.device("cpu")
    compute, master = resolve_precision(config, device)
    mesh = make_mesh(layout, device, 60)
    hf = source.build(str(path), master)
    memory.recompute_layers(hf, config.gradient_checkpointing, "eager")
    model = PackedCausalLM(hf, kernel="packed", chunk_elements=estimate.LEAST_CHUNK)
    parallelize(model, mesh, compute, master)
    vocabulary = hf.config.get_text_config().vocab_size
    row = {
        "input_ids": [n % vocabulary for n in range(length)],
        "loss_mask": [n > 0 for n in range(length)],
    }
    rows = [row] * (tokens // length)
    batch = packing.pack(rows, list(range(len(rows))))
    packed = build_layout(batch, share_prefixes=False)
    targets = torch.nonzero(batch["loss_mask"]).flatten()
    shape = estimate.ModelShape.read(path)
    pairs = tokens // plan.context // plan.tensor * max(shape.routed, 1)
    peak, fake = Peak(), FakeTensorMode(allow_non_fake_inputs=True)
    with fake, peak, peak.resizes(), even_shares(pairs, plan):
        model.to_empty(device=device)
        hf.tie_weights()
        optimizer = make_optimizer(model, config.optimizer)
        moved = {key: fake.from_tensor(value) for key, value in batch.items()}
        there, wanted = packed.map(fake.from_tensor), fake.from_tensor(targets)
        for micro_batch in range(4):  # two steps of two: gradients are there during the second one
            logprobs, _ = model(moved, there, wanted, LogprobHead())
            whole = logprobs.new_zeros(tokens).index_copy(0, wanted, logprobs)
            loss, _ = sft_loss(whole, moved["loss_mask"])
            loss.backward()  # type: ignore[no-untyped-call]
            del logprobs, whole, loss
            if micro_batch % 2:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
    setting = estimate.Setting(plan, tokens, gpu=True)
    need = estimate.trainer_rank(config, shape, setting, config.gradient_checkpointing)
    dist.destroy_process_group()
    tensors = need.total - need.parts["process"]
    return {"measured": peak.most, "estimated": tensors, "parts": need.parts}


def main(model: str) -> None:
    print("| model | layout | gradient_checkpointing | measured GiB | estimated GiB |")
    print("|---|---|---|--:|--:|")
    for name, layout, mode in CASES:
        if model in name:
            with tempfile.TemporaryDirectory() as folder:
                shutil.copy(SHAPES / f"{name}.json", Path(folder) / "config.json")
                found = measure(Path(folder), layout, mode, TOKENS, LENGTH)
            sizes = " | ".join(f"{found[k] / GIB:.1f}" for k in ("measured", "estimated"))
            print(f"| {name} | {layout} | {mode} | {sizes} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "")
