"""Checkpoints of the trainer, with torch.distributed.checkpoint.

A directory holds `trainer_state.json` (version, optimizer steps, the caller's extra), one file of
tensors per rank, and `.metadata`, which is written last: a directory without it is not a
checkpoint. Tensors are saved by their global shape, so that any number of ranks can resume, and
under the model's own names, so that parameters, their moments and their shards match one to one.
Only this engine reads them; files for other programs have the Hub's names (see `hub_names`). For a
model with LoRA only the adapters are saved, because the run loads the rest at its start.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager, BlockingAsyncStager
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed
from torch.distributed.checkpoint.storage import WriteResult

from areal.errors import InvalidInput
from areal.runs.checkpoints import DIGESTS, describe
from areal_torch.engines import random_state
from areal_torch.engines.model import lora

STATE_FILE = "trainer_state.json"
METADATA_FILE = ".metadata"


def tensors_of(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, rank: int
) -> dict[str, torch.Tensor]:
    """Returns a checkpoint's tensors by name: the live ones, and this rank's random state."""
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in lora.saved_parameters(model):
        tensors[f"model.{name}"] = parameter.detach()
        if optimizer is not None:
            for key, value in optimizer.state[parameter].items():
                tensors[f"optimizer.{name}.{key}"] = value
    for name, state in random_state.capture().items():
        tensors[f"random.{name}.{rank}"] = state
    return tensors


def save(
    directory: Path,
    tensors: dict[str, torch.Tensor],
    state: Mapping[str, Any],
    process_group: dist.ProcessGroup,
    *,
    background: bool,
    stager: AsyncStager | None = None,
) -> Future[None]:
    """Writes a checkpoint; collective over `process_group`, which is used for nothing else.

    Args:
        directory: Its folder.
        tensors: From `tensors_of`.
        state: The content of `trainer_state.json`.
        process_group: Of all ranks, for CPU tensors.
        background: Write a copy in a thread; at most one at a time.
        stager: From `stager_for`, to copy with; None: into new memory.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if dist.get_rank(process_group) == 0:
        (directory / STATE_FILE).write_text(json.dumps(dict(state), indent=2) + "\n", "utf-8")
    writer = _DigestingWriter(directory)
    if not background:
        save_distributed(tensors, storage_writer=writer, process_group=process_group)
        done: Future[None] = Future()
        done.set_result(None)
        return done
    # Copies to CPU memory before it returns, then writes in a thread.
    pending = async_save(
        tensors, storage_writer=writer, process_group=process_group, async_stager=stager
    )
    return cast("Future[None]", pending)


def stager_for(device: torch.device) -> AsyncStager | None:
    """Returns what copies a GPU's checkpoints to host memory; None on a CPU.

    It keeps its pinned memory for the next checkpoint: a step would wait seconds for gigabytes of
    new memory, which a GPU also copies to at a fraction of the bus's speed.
    """
    return BlockingAsyncStager(cache_staged_state_dict=True) if device.type == "cuda" else None


class _DigestingWriter(FileSystemWriter):
    """Each rank also writes the digests of its own files, before rank 0 writes `.metadata`."""

    def write_data(
        self, plan: SavePlan, planner: SavePlanner
    ) -> torch.futures.Future[list[WriteResult]]:
        written = super().write_data(plan, planner)
        written.wait()
        folder, prefix = Path(os.fspath(self.path)), plan.storage_data.prefix
        own = {file.name: describe(file) for file in sorted(folder.glob(f"{prefix}*.distcp"))}
        (folder / f"{prefix}{DIGESTS}").write_text(json.dumps(own), "utf-8")
        return written


def holds_scalar_model(directory: Path) -> bool:
    """Returns whether its model has a scalar head, like a reward model.

    Raises:
        InvalidInput: The checkpoint is incomplete.
    """
    return "model.hf.score.weight" in _saved(directory)


def _saved(directory: Path) -> dict[str, Any]:
    """Returns what a checkpoint knows of its tensors, by name."""
    for name in (STATE_FILE, METADATA_FILE):
        if not (directory / name).is_file():
            raise InvalidInput(
                f"checkpoint {str(directory)!r} has no {name}: expected a complete checkpoint"
            )
    return FileSystemReader(directory).read_metadata().state_dict_metadata


def load(
    directory: Path, tensors: dict[str, torch.Tensor], process_group: dist.ProcessGroup, rank: int
) -> dict[str, Any]:
    """Fills `tensors` in place and restores this rank's random state if the checkpoint has it.

    Returns:
        The content of `trainer_state.json`.

    Raises:
        InvalidInput: The checkpoint is incomplete, or belongs to another model.
    """
    saved = _saved(directory)
    state: dict[str, Any] = json.loads((directory / STATE_FILE).read_text("utf-8"))
    for name in [name for name in tensors if name.startswith("random.") and name not in saved]:
        # Written by fewer ranks: this rank continues with the random state it has.
        del tensors[name]
    for name, tensor in tensors.items():
        if name not in saved:
            raise InvalidInput(f"checkpoint {str(directory)!r} has no tensor {name!r}")
        shape = tuple(getattr(saved[name], "size", ()))
        if shape != tuple(tensor.shape):
            raise InvalidInput(
                f"checkpoint {str(directory)!r}: {name} has shape {shape}, "
                f"expected {tuple(tensor.shape)}"
            )
    load_distributed(tensors, checkpoint_id=directory, process_group=process_group)
    random_state.restore(
        {name.split(".")[1]: t for name, t in tensors.items() if name.startswith("random.")}
    )
    return state
