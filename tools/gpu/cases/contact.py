"""Whether tiny models of each family compute what transformers computes on a CPU in float64."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from tools.gpu import reference
from tools.gpu.models import batch_of, device, engine, make, make_tiny, scratch, vocabulary_of

from areal.config.training import LoraConfig, RefConfig
from areal.errors import CapacityExceeded
from areal_torch.algorithms import packing
from areal_torch.algorithms.losses import sft_loss
from areal_torch.engines.fsdp import FSDPEngine
from areal_torch.engines.model.heads import ScalarHead

_LENGTHS = [33, 7, 64, 18]


def measure(setting: dict[str, Any], miniature: bool) -> dict[str, Any]:
    """Differences from float64 with a kernel and a mode; or that a part of the engine works."""
    kind = setting.get("architecture")
    path = make(setting["shape"], miniature=True) if kind is None else make_tiny(kind)
    part = setting.get("with")
    if part is not None:
        return {**_PARTS.get(part, _compare)(path, setting, miniature), "on": str(device())}
    return _compare(path, setting, miniature)


def _compare(path: Path, setting: dict[str, Any], miniature: bool) -> dict[str, Any]:
    """Largest and mean difference of logprobs, in nats; relative difference of gradient norms."""
    batch = batch_of(_LENGTHS, vocabulary_of(path))
    expected = reference.begin(path, batch)  # at the same time
    # A CPU has one kernel.
    kernel = "packed" if miniature else setting.get("kernel")
    keys = {"dtype": setting.get("dtype"), "attn_impl": kernel, "init_from_scratch": False}
    keys |= {"gradient_checkpointing": setting.get("recompute")}
    keys |= {"offload": True} if setting.get("with") == "offload" else {}
    with engine(path, lr=0.0, **keys) as made:
        found = made.forward(batch)[batch["loss_mask"]].cpu()
        norm = _train(made, batch)["grad_norm"]
    exact, exact_norm = expected.result(60)
    apart = (found.double() - torch.tensor(exact, dtype=torch.float64)).abs()
    return {
        "largest": float(f"{apart.max():.2g}"),
        "mean": float(f"{apart.mean():.2g}"),
        "gradient": float(f"{abs(norm - exact_norm) / exact_norm:.2g}"),
    }


def _train(made: FSDPEngine, batch: packing.Batch) -> dict[str, float]:
    return made.train_batch(batch, lambda p, _, mb: sft_loss(p, mb["loss_mask"]))


def _lora(path: Path, setting: dict[str, Any], miniature: bool) -> dict[str, Any]:
    """Adapters that are new change nothing; then they learn."""
    batch = batch_of(_LENGTHS, 512)
    with engine(path, lr=1e-2, lora=LoraConfig(rank=4, alpha=8)) as made:
        with made.without_adapters():
            before = made.forward(batch)
        changed = float((made.forward(batch) - before).abs().max())
        losses = [_train(made, batch)["loss"] for _ in range(3)]
    return {"at_first": changed, "first_loss": losses[0], "third_loss": losses[2]}


def _ref(path: Path, setting: dict[str, Any], miniature: bool) -> dict[str, Any]:
    """A frozen model beside the trained one computes the same."""
    batch = batch_of(_LENGTHS, 512)
    with engine(path, init_from_scratch=True) as made:
        made.save(path)
        frozen = FSDPEngine(RefConfig(path=str(path)))
        try:
            frozen.initialize()
            apart = float((frozen.forward(batch) - made.forward(batch)).abs().max())
        finally:
            frozen.destroy()
    return {"largest": apart}


def _critic(path: Path, setting: dict[str, Any], miniature: bool) -> dict[str, Any]:
    """A scalar head learns a constant."""
    batch = batch_of(_LENGTHS, 512)

    def loss(values: torch.Tensor, _: torch.Tensor, mb: packing.Batch) -> Any:
        return ((values - 1.0).square() * mb["loss_mask"]).sum(), {}

    with engine(path, lr=1e-2, scalar=True) as made:
        losses = [made.train_batch(batch, loss, head=ScalarHead())["loss"] for _ in range(3)]
    return {"first_loss": losses[0], "third_loss": losses[2]}


def _muon(path: Path, setting: dict[str, Any], miniature: bool) -> dict[str, Any]:
    """Muon learns a batch."""
    batch = batch_of(_LENGTHS, 512)
    with engine(path, lr=1e-2, optimizer="muon") as made:
        losses = [_train(made, batch)["loss"] for _ in range(3)]
    return {"first_loss": losses[0], "third_loss": losses[2]}


def _resume(path: Path, setting: dict[str, Any], miniature: bool) -> dict[str, Any]:
    """A step after a resume is the step that would have come."""
    batch, folder = batch_of(_LENGTHS, 512), scratch()
    try:
        with engine(path, lr=1e-3) as made:
            _train(made, batch)
            made.save_checkpoint(folder, background=True).result(30)
            second = _train(made, batch)["loss"]
            made.load_checkpoint(folder)
            resumed = _train(made, batch)["loss"]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return {"difference": abs(resumed - second), "loss": second}


def _export(path: Path, setting: dict[str, Any], miniature: bool) -> dict[str, Any]:
    """Checks that every tensor arrives, in the servers' precision."""
    with engine(path) as made:
        found = dict(made.iter_full_tensors("bfloat16"))
        count = sum(1 for _ in made.model.hf.parameters())
    kinds = {str(each.dtype) for each in found.values()}
    return {"tensors": len(found), "parameters": count, "dtypes": sorted(kinds)}


def _oom(path: Path, setting: dict[str, Any], miniature: bool) -> dict[str, Any]:
    """What a train step says when memory runs out."""
    batch = batch_of(_LENGTHS, 512)

    def greedy(logprobs: torch.Tensor, _: torch.Tensor, mb: packing.Batch) -> Any:
        if miniature:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 70 GiB.")
        return torch.empty(1 << 40, device=device()).sum(), {}

    with engine(path) as made:
        try:
            made.train_batch(batch, greedy)
        except CapacityExceeded as error:
            said = str(error)
        loss = _train(made, batch)["loss"]
    return {"said": said, "loss_afterwards": loss}


_PARTS = {
    "lora": _lora,
    "ref": _ref,
    "critic": _critic,
    "muon": _muon,
    "resume": _resume,
    "export": _export,
    "oom": _oom,
}
