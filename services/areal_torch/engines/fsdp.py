"""A transformers causal language model under FSDP2: lifecycle, weights, checkpoints.

    initialize: build (shapes) -> shard -> memory -> weights -> test -> TrainStep (step.py: what
                happens to a batch)

| consumes | waits for | unblocked by |
|---|---|---|
| a background save | the writing thread | the file system; or the same timeout |
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from areal.chassis.logging import get_logger
from areal.config.checks import check
from areal.config.training import RefConfig, TrainEngineConfig
from areal.errors import InvalidInput, WaitTimeout
from areal.memory_estimate import layer_kernels
from areal_torch.algorithms.packing import Batch
from areal_torch.engines import checkpoint, optimizer
from areal_torch.engines.export.directory import write_directory
from areal_torch.engines.export.exporter import Deliver, Exporter
from areal_torch.engines.host_states import HostStates, states_of
from areal_torch.engines.model import fill, lora, recurrent, source
from areal_torch.engines.model.attention import dispatch
from areal_torch.engines.model.guards import decoder_of
from areal_torch.engines.model.heads import Head, LogprobHead
from areal_torch.engines.model.packed import PackedCausalLM
from areal_torch.engines.model.self_test import self_test
from areal_torch.engines.parallel import memory
from areal_torch.engines.parallel.apply import decoder_layers, parallelize, resolve_precision
from areal_torch.engines.parallel.mesh import (
    Mesh,
    join_process_group,
    local_device,
    make_mesh,
    new_group,
    reduce_scalars,
)
from areal_torch.engines.step import TrainStep
from areal_torch.engines.train_api import LossFn, LossWeightFn, TrainEngine
from areal_torch.engines.versions import check_versions


class FSDPEngine(TrainEngine):
    """A transformers causal language model trained with FSDP2; see `TrainEngine` for the contract.

    Runs under torchrun with any number of ranks (gloo on CPU, NCCL on GPU), or alone in any
    process.

    Example:
        >>> engine = FSDPEngine(TrainEngineConfig(path="runs/tiny"))
        >>> engine.initialize(total_train_steps=100)
        >>> stats = engine.train_batch(batch, lambda p, _, mb: sft_loss(p, mb["loss_mask"]))
    """

    def __init__(self, config: TrainEngineConfig | RefConfig) -> None:
        """Keeps the configuration; nothing is loaded before `initialize`.

        Raises:
            ConfigError: One of its values is not allowed.
        """
        if isinstance(config, TrainEngineConfig):
            config.check_optimizer()
        check(config)
        self.config = config
        self._version = 0
        self._owns_group = False
        self._mesh: Mesh | None = None
        self._step: TrainStep | None = None
        self._exporter: Exporter | None = None
        self._sharded = False
        self._checkpoint_group: Any = None
        self._pending_save: Future[None] | None = None
        self._stager: Any = None
        self._attached: dict[str, FSDPEngine] = {}
        self._states: HostStates | None = None
        self.before_use: Callable[[], None] = lambda: None
        """Called, on all ranks alike, each time the model is about to be used."""
        self.taken: list[dict[str, float]] | None = None
        """The statistics of each optimizer step, if someone set a list to collect them."""

    # -- life cycle ----------------------------------------------------------------------------

    def initialize(self, total_train_steps: int | None = None) -> None:
        check_versions()
        config = self.config
        self.device = local_device()
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self._owns_group = join_process_group(self.device, config.distributed_timeout_seconds)
        # Saves run their collectives in a thread: beside, not between, those of training.
        everyone, limit = range(dist.get_world_size()), config.distributed_timeout_seconds
        self._checkpoint_group = new_group(everyone, "checkpoint", limit, "gloo")
        self._stager = checkpoint.stager_for(self.device)
        self._mesh = make_mesh(config.layout, self.device, limit)
        compute, master = resolve_precision(config, self.device)
        # What is frozen needs no more precision than it computes in.
        stored = master if config.lora is None else compute
        hf = source.build(
            config.path, stored, scalar=config.scalar, from_scratch=config.init_from_scratch
        )
        if config.lora is not None:
            lora.inject(hf, config.lora, master)
        gpu = self.device.type == "cuda"
        kernels = layer_kernels(config.kernels, hf.config.model_type, self.mesh.layout, gpu=gpu)
        budget = None
        if isinstance(config, TrainEngineConfig) and config.optimizer is not None:
            budget = memory.budget(config, self._mesh, self.device)
            memory.recompute_layers(hf, budget.mode, kernels)
        if config.optimizer is None:
            hf.requires_grad_(False)
        kernel = dispatch.choose(hf, config.attn_impl, self.device, compute)
        chunk = budget.chunk if budget else memory.frozen_chunk(config, hf, self.device)
        trains = config.optimizer is not None
        model = PackedCausalLM(
            hf,
            kernel=kernel,
            chunk_elements=chunk,
            boundaries=recurrent.choose(hf, decoder_of(hf), self.device, compute, trains=trains),
            replays=trains and not config.scalar,
        )
        memory.use_kernels(hf, decoder_layers(hf), kernels, self.device)
        offload = config.offload
        self._sharded = (
            self.world_size > 1 or compute != master or config.fsdp_at_world_size_1 or offload
        )
        if self._sharded:
            parallelize(model, self._mesh, compute, master, offload=offload)
        with fill.freed_at_once():
            fill.materialize(model, self.device, torch.device("cpu") if offload else self.device)
            source.fill_weights(
                hf,
                config.path,
                stored,
                from_scratch=config.init_from_scratch,
                seed=config.seed,
            )
            lora.draw(hf, config.seed)
            tested = self_test(model, self.device, compute)
        if self.rank == 0:
            log = get_logger(__name__)
            log.info("self_test_passed", **asdict(tested))
            if budget is not None:
                estimated = {"each_rank": str(budget), "recompute": budget.mode}
                log.info("memory_estimate", **estimated, kernels=kernels)
        self._step = TrainStep(
            model,
            config,
            self.device,
            self._mesh,
            sharded=self._sharded,
            budget=budget,
            total_train_steps=total_train_steps,
        )
        self._exporter = Exporter(hf, Path(config.path), self.device, limit)
        self._states = HostStates(self.device)
        if self._step.optimizer is not None:
            optimizer.make_state(self._step.optimizer)
            self._step.optimizer.register_step_pre_hook(lambda *_: self.exporter.wait_gathered())

    def destroy(self) -> None:
        self._wait_for_save()
        if self._exporter is not None:
            self._exporter.wait_gathered()
        self._step = self._exporter = self._stager = self._states = None
        if self._owns_group and dist.is_initialized():
            dist.destroy_process_group()
        self._owns_group = False

    @property
    def step(self) -> TrainStep:
        """The part that computes, with the model and its optimizer.

        Raises:
            InvalidInput: Before `initialize` or after `destroy`.
        """
        if self._step is None:
            raise InvalidInput("the engine has no model: expected initialize() first")
        self._be_here()
        return self._step

    @property
    def exporter(self) -> Exporter:
        """The part that gathers the weights on rank 0; raises the errors of `step`."""
        if self._exporter is None:
            raise InvalidInput("the engine has no model: expected initialize() first")
        self._be_here()
        return self._exporter

    def to_host(self) -> None:
        """Moves the states to host memory once they have been exported, and frees the device's."""
        if self._step is None or self._exporter is None or self._states is None:
            return
        self._reshard_model(self._step.model)
        self._exporter.wait_gathered()
        self._states.to_host(states_of(self._step.model, self._step.optimizer))

    def to_device(self) -> None:
        """Moves the states back."""
        if self._states is not None:
            self._states.to_device()

    def _be_here(self) -> None:
        self.before_use()
        self.to_device()

    @property
    def model(self) -> PackedCausalLM:
        return self.step.model

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def world_size(self) -> int:
        return dist.get_world_size()

    @property
    def mesh(self) -> Mesh:
        """The ranks that share model and batch.

        Raises:
            InvalidInput: Before `initialize`.
        """
        if self._mesh is None:
            raise InvalidInput("the engine has no ranks: expected initialize() first")
        return self._mesh

    @property
    def process_group(self) -> Any:
        return self.mesh.data_group

    def get_version(self) -> int:
        return self._version

    def set_version(self, version: int) -> None:
        self._version = version

    # -- computing -----------------------------------------------------------------------------

    def accumulate(
        self,
        batch: Batch,
        loss_fn: LossFn,
        loss_weight_fn: LossWeightFn | None = None,
        *,
        head: Head | None = None,
    ) -> None:
        self.step.accumulate(batch, loss_fn, loss_weight_fn, head or LogprobHead())

    def apply(self) -> dict[str, float]:
        stats = self.step.apply()
        if self.taken is not None:
            self.taken.append(stats)
        return stats

    def read(self, batch: Batch, head: Head | None = None) -> tuple[Tensor, Tensor]:
        return self.step.read(batch, head or LogprobHead())

    @contextmanager
    def without_adapters(self) -> Iterator[None]:
        """Returns a context in which the model computes without its LoRA adapters."""
        with lora.switched_off(self.model.hf), self.model.routes.switched_off():
            yield

    def reduce_stats(self, sums: Mapping[str, Tensor | float]) -> dict[str, float]:
        return reduce_scalars(sums, self.mesh.data_group)

    # -- weights and checkpoints ---------------------------------------------------------------

    def iter_full_tensors(self, dtype: str | None = None) -> Iterator[tuple[str, Tensor]]:
        self._reshard()
        for bucket in self.exporter.gathering(dtype).buckets():
            for name, tensor in bucket:
                yield name, tensor.cpu()

    def export(
        self,
        dtype: str | None,
        deliver: Deliver,
        *,
        twice: bool = False,
        adapters: bool = False,
    ) -> Future[None]:
        self._reshard()
        return self.exporter.begin(dtype, deliver, twice=twice, adapters=adapters)

    def _reshard(self) -> None:
        self._reshard_model(self.model)

    def _reshard_model(self, model: PackedCausalLM) -> None:
        if self._sharded:
            cast(FSDPModule, model).reshard()

    def save(self, directory: str | Path, dtype: str | None = None) -> None:
        tensors = self.iter_full_tensors(dtype)
        if self.rank == 0:
            write_directory(Path(directory), tensors, self.model.hf, Path(self.config.path))
        else:
            for _ in tensors:
                pass
        dist.barrier()

    @torch.no_grad()
    def load(self, directory: str | Path) -> None:
        self._reshard()
        self.exporter.wait_gathered()
        fill.load_own(self.model.hf, Path(directory))

    def save_checkpoint(
        self,
        directory: str | Path,
        extra: Mapping[str, Any] | None = None,
        *,
        background: bool = False,
    ) -> Future[None]:
        self._wait_for_save()
        self._reshard()
        state = {
            "version": self._version,
            "optimizer_steps": self.step.steps_taken,
            "world_size": self.world_size,
            "attached": {name: each.step.steps_taken for name, each in self._attached.items()},
            "extra": dict(extra or {}),
        }
        tensors = self._checkpoint_tensors()
        self._pending_save = checkpoint.save(
            Path(directory),
            tensors,
            state,
            self._checkpoint_group,
            background=background,
            stager=self._stager,
        )
        return self._pending_save

    def checkpoint_bytes(self) -> int:
        """Returns the size of a checkpoint's tensors, summed over all ranks."""
        return sum(tensor.nbytes for tensor in self._checkpoint_tensors().values())

    def _checkpoint_tensors(self) -> dict[str, Tensor]:
        tensors = checkpoint.tensors_of(self.model, self.step.optimizer, self.rank)
        for name, each in self._attached.items():
            tensors |= each._attached_tensors(name)
        return tensors

    def _attached_tensors(self, name: str) -> dict[str, Tensor]:
        """Returns what another engine's checkpoint holds of this one: all but the random state."""
        self._reshard()
        own = checkpoint.tensors_of(self.model, self.step.optimizer, self.rank)
        return {f"{name}.{key}": t for key, t in own.items() if not key.startswith("random.")}

    def attach(self, name: str, engine: FSDPEngine) -> None:
        """Saves another engine's weights and optimizer in this one's checkpoints, under `name`."""
        self._attached[name] = engine

    def load_attached(self, name: str, directory: str | Path) -> None:
        """Resumes an attached engine from a checkpoint of this one; collective.

        Raises:
            InvalidInput: The checkpoint has no such engine.
        """
        engine = self._attached[name]
        tensors = engine._attached_tensors(name)
        state = checkpoint.load(Path(directory), tensors, self._checkpoint_group, self.rank)
        engine.step.steps_taken = int(state["attached"][name])

    def load_checkpoint(self, directory: str | Path) -> dict[str, Any]:
        self._wait_for_save()
        self.exporter.wait_gathered()
        self._reshard()
        tensors = checkpoint.tensors_of(self.model, self.step.optimizer, self.rank)
        state = checkpoint.load(Path(directory), tensors, self._checkpoint_group, self.rank)
        self._version = int(state["version"])
        self.step.steps_taken = int(state["optimizer_steps"])
        extra: dict[str, Any] = state["extra"]
        return extra

    def _wait_for_save(self) -> None:
        if self._pending_save is None:
            return
        since, limit = time.monotonic(), self.config.distributed_timeout_seconds
        try:
            self._pending_save.result(timeout=limit)
        except TimeoutError:
            raise WaitTimeout(
                "the background checkpoint", on="the file system", since=since
            ) from None
        self._pending_save = None
