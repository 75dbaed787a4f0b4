"""FSDP2 training engine: packed sequences, micro-batches by token budget, one optimizer.

    this rank's batch
          | split by tokens, into as many micro-batches as the rank that needs most
          v                        (a rank with fewer runs two dummy tokens with weight 0)
    forward, packed, prefixes once -> logprobs at loss tokens -> loss_fn -> loss sum
          |
          v
    backward of loss sum x world_size / W      (W: loss tokens of all micro-batches of all
          |                                     ranks; FSDP averages gradients over ranks)
          v
    global gradient norm -> clip -> AdamW, or skip if it is not finite; several in a row: the end

| consumes | waits for | unblocked by |
|---|---|---|
| a share of a batch | the other ranks | every rank calling the same method; the timeout |
| a background save | the writing thread | the file system; or the same timeout |
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from areal.algorithms import packing
from areal.algorithms.packing import Batch
from areal.chassis.logging import get_logger
from areal.config.checks import check
from areal.config.training import RefConfig, TrainEngineConfig
from areal.engines import checkpoint, finite
from areal.engines.export.directory import write_directory
from areal.engines.model import hub_names, source
from areal.engines.model.attention.packed import build_layout
from areal.engines.model.packed import PackedCausalLM
from areal.engines.model.self_test import self_test
from areal.engines.parallel.apply import (
    DTYPES,
    make_optimizer,
    resolve_precision,
    shard,
)
from areal.engines.parallel.memory import checkpoints_activations, recompute_layers
from areal.engines.parallel.mesh import join_process_group, local_device, reduce_scalars
from areal.engines.train_api import LossFn, LossWeightFn, TrainEngine
from areal.errors import InvalidInput, TrainingDiverged, WaitTimeout
from areal.training.ranks import gather_json


def count_loss_tokens(batch: Batch) -> int:
    """Return the number of loss tokens of a batch."""
    return int(batch["loss_mask"].sum())


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
        """Keep the configuration; nothing is loaded before `initialize`.

        Raises:
            ConfigError: One of its values cannot be.
        """
        check(config)
        self.config = config
        self.optimizer: torch.optim.AdamW | None = None
        self.optimizer_steps = 0
        self._skipped_in_a_row = 0
        self._version = 0
        self._total_train_steps: int | None = None
        self._owns_group = False
        self._model: PackedCausalLM | None = None
        self._sharded = False
        self._checkpoint_group: Any = None
        self._pending_save: Future[None] | None = None
        self._log = get_logger("areal.engines.fsdp")

    # -- life cycle ----------------------------------------------------------------------------

    def initialize(self, total_train_steps: int | None = None) -> None:
        config = self.config
        self.device = local_device()
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self._owns_group = join_process_group(self.device, config.distributed_timeout_seconds)
        # Saves run their collectives in a thread: beside, not between, those of training.
        self._checkpoint_group = dist.new_group(
            backend="gloo", timeout=timedelta(seconds=config.distributed_timeout_seconds)
        )
        compute, master, flash = resolve_precision(config, self.device)
        hf = source.load_model(
            config.path,
            master,
            flash=flash,
            from_scratch=config.init_from_scratch,
            seed=config.seed,
        )
        if checkpoints_activations(config, self.device):
            recompute_layers(hf)
        if config.optimizer is None:
            hf.requires_grad_(False)
        self._flash = flash
        model = PackedCausalLM(hf, flash=flash, chunk_elements=config.logits_chunk_elements)
        tested = self_test(model, self.device, compute)
        if self.rank == 0:
            get_logger("areal.engines.fsdp").info("self_test_passed", **asdict(tested))
        offload = isinstance(config, RefConfig) and config.offload
        self._sharded = (
            self.world_size > 1 or compute != master or config.fsdp_at_world_size_1 or offload
        )
        if self._sharded:
            shard(model, self.device, compute, master, offload=offload)
        if not offload:
            model.to(self.device)
        self._model = model
        self._total_train_steps = total_train_steps
        if config.optimizer is not None:
            self.optimizer = make_optimizer(model, config.optimizer)
            checkpoint.make_optimizer_state(self.optimizer)

    def destroy(self) -> None:
        self._wait_for_save()
        self._model = None
        self.optimizer = None
        if self._owns_group and dist.is_initialized():
            dist.destroy_process_group()
        self._owns_group = False

    @property
    def model(self) -> PackedCausalLM:
        """The wrapped model.

        Raises:
            InvalidInput: before `initialize` or after `destroy`.
        """
        if self._model is None:
            raise InvalidInput("the engine has no model: expected initialize() first")
        return self._model

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def world_size(self) -> int:
        return dist.get_world_size()

    @property
    def process_group(self) -> Any:
        return dist.group.WORLD if self.world_size > 1 else None

    def get_version(self) -> int:
        return self._version

    def set_version(self, version: int) -> None:
        self._version = version

    # -- computing -----------------------------------------------------------------------------

    def train_batch(
        self,
        batch: Batch,
        loss_fn: LossFn,
        loss_weight_fn: LossWeightFn | None = None,
        *,
        temperature: float = 1.0,
    ) -> dict[str, float]:
        started = time.perf_counter()
        if self.optimizer is None:
            raise InvalidInput("optimizer=None: expected an optimizer to train a model")
        packing.check_batch(batch)
        micro_batches = self._micro_batches(batch)
        weigh = loss_weight_fn or count_loss_tokens
        weight_of = [0 if index is None else weigh(mb) for index, mb in micro_batches]
        counts = self.reduce_stats(
            {"weight": float(sum(weight_of)), "tokens": float(len(batch["input_ids"]))}
        )
        total_weight = counts["weight"]
        # FSDP averages gradients over ranks; the loss is a sum over them.
        scale = (self.world_size if self._sharded else 1) / max(total_weight, 1.0)
        sums: dict[str, Tensor] = {}
        bad_logprobs: Tensor | int = 0
        for (index, mb), weight in zip(micro_batches, weight_of, strict=True):
            logprobs, entropies = self._logprobs(mb, temperature)
            bad_logprobs = bad_logprobs + (~torch.isfinite(logprobs.detach())).sum()
            loss_sum, stats = loss_fn(logprobs, entropies, mb)
            used = float(index is not None and weight > 0)
            torch.autograd.backward(loss_sum * (scale * used))
            stats = {**stats, "loss": loss_sum.detach(), "entropy": entropies.sum()}
            for name, raw in stats.items():
                value = raw.detach().double() * used
                if name.endswith("_max"):
                    sums[name] = torch.maximum(sums[name], value) if name in sums else value
                else:
                    sums[name] = sums[name] + value if name in sums else value
        grad_norm, lr, stepped = self._optimizer_step(apply=total_weight > 0)
        if stepped:
            self._skipped_in_a_row = 0
        elif total_weight > 0:
            self._note_skipped(batch, int(bad_logprobs), float(sums["loss"]), grad_norm)
        reduced = self.reduce_stats(sums)
        result = {
            name: value if name.endswith("_max") else value / max(total_weight, 1.0)
            for name, value in reduced.items()
        }
        result |= {
            "grad_norm": grad_norm,
            "lr": lr,
            "n_tokens": counts["tokens"],
            "n_loss_tokens": total_weight,
            "n_micro_batches": float(len(micro_batches)),
            "skipped_steps": float(not stepped),
            "seconds": time.perf_counter() - started,
        }
        return result

    def _note_skipped(self, batch: Batch, bad_logprobs: int, loss: float, grad_norm: float) -> None:
        """Say on rank 0 why a step was skipped; end training where one after the other is."""
        assert self.config.optimizer is not None
        self._skipped_in_a_row += 1
        found = gather_json(finite.find_cause(batch, bad_logprobs, loss))
        cause = finite.name_cause(found, grad_norm)
        if self.rank == 0:
            self._log.warning(
                "optimizer_step_skipped", in_a_row=self._skipped_in_a_row, cause=cause
            )
        if self._skipped_in_a_row >= self.config.optimizer.max_skipped_steps:
            raise TrainingDiverged(
                f"{self._skipped_in_a_row} optimizer steps in a row had a gradient that is not "
                f"finite: {cause}",
                cause=cause,
                batch=batch,
                groups=found[self.rank]["groups"],
            )

    def _optimizer_step(self, *, apply: bool) -> tuple[float, float, bool]:
        """Clip and step; returns the gradient norm, the learning rate, and whether it stepped."""
        optimizer, config = self.optimizer, self.config.optimizer
        assert optimizer is not None
        assert config is not None
        lr = config.learning_rate(self.optimizer_steps, self._total_train_steps)
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        if hasattr(norm, "full_tensor"):
            norm = norm.full_tensor()
        grad_norm = float(norm)
        stepped = apply and bool(torch.isfinite(norm))
        if stepped:
            if config.gradient_clipping > 0:
                torch.nn.utils.clip_grads_with_norm_(parameters, config.gradient_clipping, norm)
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
            self.optimizer_steps += 1
        optimizer.zero_grad(set_to_none=True)
        return grad_norm, lr, stepped

    def forward(self, batch: Batch, *, temperature: float = 1.0) -> Tensor:
        packing.check_batch(batch)
        result: Tensor | None = None
        with torch.no_grad():
            for index, mb in self._micro_batches(batch):
                logprobs, _ = self._logprobs(mb, temperature)
                if result is None:
                    result = logprobs.new_zeros(len(batch["input_ids"]))
                if index is not None:
                    result[packing.token_index(batch, index).to(self.device)] = logprobs
        if self._sharded:
            # The root keeps its gathered parameters after a forward; they would miss a later load.
            self.model.reshard()  # type: ignore[operator]
        assert result is not None
        return result.to(batch["input_ids"].device)

    def _micro_batches(self, batch: Batch) -> list[tuple[list[int] | None, Batch]]:
        """Split this rank's share into as many micro-batches as all ranks; a dummy has no index."""
        spec = self.config.mb_spec
        count = spec.n_mbs
        # A larger smallest number can only make more bins: this ends at the largest number of bins
        # of any rank.
        while True:
            split = packing.split_micro_batches(batch, spec.max_tokens_per_mb, count)
            largest = int(self.reduce_stats({"n_max": float(max(len(split), 1))})["n_max"])
            if largest <= count or self.world_size == 1:
                break
            count = largest
        chosen: list[tuple[list[int] | None, Batch]] = []
        for number in range(max(largest, 1)):
            if number < len(split):
                index = split[number]
                whole = len(split) == 1 and index == list(range(len(index)))
                chosen.append(
                    (index, self._to_device(batch if whole else packing.select(batch, index)))
                )
            else:
                chosen.append((None, self._to_device(packing.dummy_like(batch))))
        return chosen

    def _to_device(self, batch: Batch) -> Batch:
        return {key: value.to(self.device, non_blocking=True) for key, value in batch.items()}

    def _logprobs(self, mb: Batch, temperature: float) -> tuple[Tensor, Tensor]:
        """Logprobs and entropies of a micro-batch, full length, 0 where loss_mask is false."""
        targets = torch.nonzero(mb["loss_mask"]).flatten()
        layout = build_layout(mb, share_prefixes=self.config.share_prefixes and not self._flash)
        # A micro-batch without loss tokens still takes part in the collectives of forward and
        # backward; it may be a single token, so it asks for its first.
        wanted = targets if len(targets) else targets.new_zeros(1)
        logprobs, entropies = self.model(mb, layout, wanted, temperature)
        if not len(targets):
            logprobs = logprobs * 0.0
        zeros = logprobs.new_zeros(len(mb["input_ids"]))
        entropies = torch.where(mb["loss_mask"], zeros.index_copy(0, wanted, entropies), 0.0)
        return zeros.index_copy(0, wanted, logprobs), entropies

    def reduce_stats(self, sums: Mapping[str, Tensor | float]) -> dict[str, float]:
        return reduce_scalars(sums, self.process_group)

    # -- weights and checkpoints ---------------------------------------------------------------

    @torch.no_grad()
    def iter_full_tensors(self, dtype: str | None = None) -> Iterator[tuple[str, Tensor]]:
        hf = self.model.hf
        if self._sharded:
            self.model.reshard()  # type: ignore[operator]
        live, exported = hub_names.live_tensors(hf), set[str]()
        for step in hub_names.export_steps(hf):
            whole = (self._whole(live[name], dtype) for name in step.names)
            if self.rank != 0:
                for _ in whole:
                    pass
                continue
            for name, tensor in step.run(hf, whole):
                exported.add(name)
                yield name, tensor
        if self.rank == 0:
            yield from hub_names.bystanders(hf, Path(self.config.path), exported)

    def _whole(self, live: Tensor, dtype: str | None) -> Tensor:
        """Gathered from all ranks; on rank 0 a copy, so that the next step does not change it."""
        full = live.detach()
        full = full.full_tensor() if hasattr(full, "full_tensor") else full
        if self.rank != 0:
            return full
        target = DTYPES[dtype] if dtype and full.is_floating_point() else full.dtype
        return full.to(device="cpu", dtype=target, copy=True)

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
        hf = self.model.hf
        if self._sharded:
            self.model.reshard()  # type: ignore[operator]
        live = hub_names.live_tensors(hf)
        with source.TensorDirectory(Path(directory)) as tensors:
            try:
                steps = hub_names.import_steps(hf, tensors)
            except InvalidInput as error:
                raise InvalidInput(f"directory {str(directory)!r}: {error}") from None
            for step in steps:
                for name, tensor in step.run(hf, map(tensors.read, step.names)):
                    live[name].copy_(_shard_like(tensor, live[name]))

    def save_checkpoint(
        self,
        directory: str | Path,
        extra: Mapping[str, Any] | None = None,
        *,
        background: bool = False,
    ) -> Future[None]:
        self._wait_for_save()
        if self._sharded:
            self.model.reshard()  # type: ignore[operator]
        state = {
            "version": self._version,
            "optimizer_steps": self.optimizer_steps,
            "world_size": self.world_size,
            "extra": dict(extra or {}),
        }
        tensors = checkpoint.tensors_of(self.model, self.optimizer, self.rank)
        self._pending_save = checkpoint.save(
            Path(directory), tensors, state, self._checkpoint_group, background=background
        )
        return self._pending_save

    def load_checkpoint(self, directory: str | Path) -> dict[str, Any]:
        self._wait_for_save()
        if self._sharded:
            self.model.reshard()  # type: ignore[operator]
        tensors = checkpoint.tensors_of(self.model, self.optimizer, self.rank)
        state = checkpoint.load(Path(directory), tensors, self._checkpoint_group, self.rank)
        self._version = int(state["version"])
        self.optimizer_steps = int(state["optimizer_steps"])
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


def _shard_like(tensor: Tensor, live: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor, distribute_tensor

    tensor = tensor.to(live.dtype)
    if not isinstance(live, DTensor):
        return tensor
    return distribute_tensor(tensor.to(live.device), live.device_mesh, live.placements)
