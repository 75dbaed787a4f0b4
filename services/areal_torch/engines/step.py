"""One optimizer step over all ranks, or a forward pass, in micro-batches by token budget.

    this rank's batch
          | split by tokens, into as many micro-batches as the rank that needs most
          v                        (a rank with fewer runs two dummy tokens with weight 0)
    forward, packed, prefixes once -> logprobs at loss tokens -> loss_fn -> loss sum
          |
          v
    backward of loss sum x ranks               (FSDP averages gradients over ranks)
          |
          v            accumulate: any number of times, then apply
    global gradient norm / W                   (W: loss tokens of all micro-batches of all shares)
          |
          v
    AdamW of gradients / W, clipped, or nothing if the norm is not finite; several in a row: the end

The device decides whether a step is skipped, and the host reads the norm and all statistics in one
transfer afterwards: the only time in a step that it waits for the device.

| consumes | waits for | unblocked by |
|---|---|---|
| a share of a batch | the other ranks | every rank calling the same method; the timeout |
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from areal.chassis.logging import get_logger
from areal.config.training import RefConfig, TrainEngineConfig
from areal.errors import CapacityExceeded, InvalidInput, TrainingDiverged
from areal_torch.algorithms import images, packing
from areal_torch.algorithms.packing import Batch
from areal_torch.engines import finite
from areal_torch.engines.model import vision
from areal_torch.engines.model.attention.dispatch import PACKED
from areal_torch.engines.model.heads import Head
from areal_torch.engines.model.packed import PackedCausalLM
from areal_torch.engines.optimizer import make_optimizer
from areal_torch.engines.parallel import gradients
from areal_torch.engines.parallel.apply import resolve_precision
from areal_torch.engines.parallel.memory import Budget, free_bytes
from areal_torch.engines.parallel.mesh import Mesh, reduce_scalars, to_host
from areal_torch.engines.perf import Phases, Work, peak_flops, peak_gib
from areal_torch.engines.train_api import LossFn, LossWeightFn
from areal_torch.training.ranks import gather_json


def count_loss_tokens(batch: Batch) -> int:
    """Returns the number of loss tokens of a batch."""
    return int(batch["loss_mask"].sum())


_WORTH_SHARING = 0.2
"""The part of a micro-batch's tokens in common prefixes from which on a GPU's attention kernels
share them: copying queries, keys and values cost an H200 14 % of a step (docs/gpu.md)."""
_NORM, _BAD = "norm of the gradient", "logprobs that are not finite"
"""Names beside those of a loss function's statistics."""


@dataclass
class _Gathered:
    """Sums over the micro-batches of this rank since the last optimizer step."""

    started: float = field(default_factory=time.perf_counter)
    batch: Batch = field(default_factory=dict)
    """The batch of the last step."""
    sums: dict[str, Tensor] = field(default_factory=dict)
    weight: int = 0
    tokens: int = 0
    flops: float = 0.0
    micro_batches: int = 0
    bad_logprobs: Tensor | int = 0
    routed: int = 0
    """Tokens whose experts are those that the server chose."""
    unrouted: int = 0
    """Sequences without any such token."""


class TrainStep:
    """Computes with one model, and trains it if there is an optimizer; all methods are collective.

    `accumulate`, `apply` and `read` are those of `TrainEngine`.
    """

    def __init__(
        self,
        model: PackedCausalLM,
        config: TrainEngineConfig | RefConfig,
        device: torch.device,
        mesh: Mesh,
        *,
        sharded: bool,
        budget: Budget | None,
        total_train_steps: int | None,
    ) -> None:
        """Makes the optimizer, if the configuration has one.

        Args:
            model: On its device, sharded if it is to be.
            config: The engine's configuration.
            device: The device that computes batches.
            mesh: The ranks that share model and batch.
            sharded: Gradients are averaged over ranks.
            budget: The memory budget, named in an out-of-memory error; None: nothing is trained.
            total_train_steps: For the learning-rate schedule; None: a constant rate.
        """
        self.model = model
        self.optimizer: torch.optim.AdamW | None = None
        if config.optimizer is not None:
            self.optimizer = make_optimizer(model, config.optimizer)
        self.steps_taken = 0
        self._config = config
        self._device = device
        self._mesh = mesh
        self._sharded = sharded
        self._budget = budget
        self._total_train_steps = total_train_steps
        self._skipped_in_a_row = 0
        self._gathered: _Gathered | None = None
        self._somewhere_images = False  # in the last batch, of any rank
        self._phases = Phases(device)
        self.work = Work.of(model.hf)
        self._peak_flops = peak_flops(device, resolve_precision(config, device)[0])
        self._averaged = mesh.layout.averaged if sharded else 1
        self._gathers_gradients = self.optimizer is not None and self._has_room_for_gradients()
        self._log = get_logger(__name__)

    def _has_room_for_gradients(self) -> bool:
        """Whether whole gradients take at most a quarter of each rank's free memory.

        Where ranks share matrices or tokens, each micro-batch's gradients are shared out at once:
        the hooks that add up partial gradients expect it.
        """
        if not self._sharded or dist.get_world_size() == 1 or self._mesh.layout.per_share > 1:
            return False
        whole = 4 * sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        short = {"short_max": float(4 * whole > free_bytes(self._device))}
        return not reduce_scalars(short, dist.group.WORLD)["short_max"]

    def accumulate(
        self,
        batch: Batch,
        loss_fn: LossFn,
        loss_weight_fn: LossWeightFn | None,
        head: Head,
    ) -> None:
        if self.optimizer is None:
            raise InvalidInput("optimizer=None: expected an optimizer to train a model")
        packing.check_batch(batch)
        self.model.check_images(batch, self._mesh.layout.per_share)
        self.model.check_tokens(batch)
        self._gathered = so_far = self._gathered or _Gathered()
        so_far.batch = batch
        so_far.tokens += len(batch["input_ids"])
        routed, unrouted = self.model.routes.count(batch)
        so_far.routed += routed
        so_far.unrouted += unrouted
        so_far.flops += self.work.flops(batch["cu_seqlens"], count_loss_tokens(batch))
        try:
            micro_batches = self._micro_batches(batch)
            for number, (index, mb) in enumerate(micro_batches):
                if self._gathers_gradients:
                    # Whole gradients add up on each rank, and are shared out once.
                    last = number + 1 == len(micro_batches)
                    cast(FSDPModule, self.model).set_requires_gradient_sync(last)
                self._backward(index, mb, loss_fn, loss_weight_fn or count_loss_tokens, head)
        except torch.OutOfMemoryError as error:
            self._forget()
            raise self._out_of_memory(error, batch) from error
        except BaseException:
            self._forget()
            raise

    def _backward(
        self,
        index: list[int] | None,
        mb: Batch,
        loss_fn: LossFn,
        weigh: LossWeightFn,
        head: Head,
    ) -> None:
        """Adds a micro-batch's gradients and statistics to what is gathered."""
        assert self._gathered is not None
        so_far, weight = self._gathered, 0 if index is None else weigh(mb)
        with self._phases("forward"):
            logprobs, entropies, mb = self._read(mb, head)
            loss_sum, stats = loss_fn(logprobs, entropies, mb)
        used = index is not None and weight > 0
        if not used:  # a dummy: what a loss makes of it, perhaps NaN, must not count
            loss_sum = logprobs.sum() * 0.0
        with self._phases("backward"):
            # FSDP averages gradients over ranks; the loss is a sum over their tokens.
            torch.autograd.backward(loss_sum * self._averaged)
        so_far.weight += weight
        so_far.micro_batches += 1
        so_far.bad_logprobs = so_far.bad_logprobs + (~torch.isfinite(logprobs.detach())).sum()
        stats = {**stats, "loss": loss_sum.detach(), "entropy": entropies.sum()}
        sums = so_far.sums
        for name, raw in stats.items():
            value = raw.detach().double()
            if not used:
                value = torch.full_like(value, -math.inf if name.endswith("_max") else 0.0)
            if name.endswith("_max"):
                sums[name] = torch.maximum(sums[name], value) if name in sums else value
            else:
                sums[name] = sums[name] + value if name in sums else value

    def apply(self) -> dict[str, float]:
        if self._gathered is None:
            raise InvalidInput("nothing is accumulated: expected accumulate() before apply()")
        done, self._gathered = self._gathered, None
        mine = {"weight": done.weight, "tokens": done.tokens}
        mine |= {"routed": done.routed, "unrouted": done.unrouted}
        counts = reduce_scalars(
            {name: float(value) for name, value in mine.items()}, self._mesh.data_group
        )
        total_weight = counts["weight"]
        with self._phases("optimizer"):
            norm, lr = self._optimizer_step(total_weight)
        sums = to_host({**done.sums, _NORM: norm, _BAD: done.bad_logprobs})
        grad_norm, bad_logprobs = sums.pop(_NORM), int(sums.pop(_BAD))
        stepped = total_weight > 0 and math.isfinite(grad_norm)
        if stepped:
            self.steps_taken += 1
            self._skipped_in_a_row = 0
        elif total_weight > 0:
            self._note_skipped(done.batch, bad_logprobs, sums["loss"], grad_norm)
        spent = self._phases.take("forward", "backward", "optimizer")
        seconds = time.perf_counter() - done.started
        own = {f"{name}_seconds": value for name, value in spent.items()}
        own |= {"seconds": seconds, "peak_gib": peak_gib(self._device)}
        reduced = reduce_scalars({**sums, "flops": done.flops}, self._mesh.data_group)
        flops = reduced.pop("flops")
        # Ranks of one share differ in time and memory, too.
        everyone = dist.group.WORLD if dist.get_world_size() > 1 else None
        worst = reduce_scalars({f"{name}_max": value for name, value in own.items()}, everyone)
        slowest = {name: worst[f"{name}_max"] for name in own}
        result = {
            name: value if name.endswith("_max") else value / max(total_weight, 1.0)
            for name, value in reduced.items()
            if value != -math.inf or total_weight > 0  # the maximum of nothing
        }
        result |= {
            "grad_norm": grad_norm,
            "lr": lr,
            "n_tokens": counts["tokens"],
            "n_loss_tokens": total_weight,
            "n_micro_batches": float(done.micro_batches),
            "skipped_steps": float(not stepped),
            **slowest,
            "tokens_per_second": counts["tokens"] / slowest["seconds"],
        }
        if self.model.routes.mixture and "behavior_logprobs" in done.batch:
            result["routed_ratio"] = counts["routed"] / max(counts["tokens"], 1.0)
            result["unrouted_sequences"] = counts["unrouted"]
        if self._peak_flops is not None:
            result["mfu"] = flops / slowest["seconds"] / dist.get_world_size() / self._peak_flops
        return result

    def _forget(self) -> None:
        """Drops what is gathered, after an error."""
        assert self.optimizer is not None
        self._gathered = None
        self._phases.take("forward", "backward", "optimizer")
        self.optimizer.zero_grad(set_to_none=True)

    def _out_of_memory(self, error: Exception, batch: Batch) -> CapacityExceeded:
        assert self._budget is not None
        longest = int(batch["cu_seqlens"].diff().max())
        return CapacityExceeded(
            f"out of memory in a train step, longest sequence {longest} tokens, estimated "
            f"{self._budget}: expected {self._budget.ways_out} "
            f"({' '.join(str(error).split())[:200]})"
        )

    def _note_skipped(self, batch: Batch, bad_logprobs: int, loss: float, grad_norm: float) -> None:
        """Says on rank 0 why a step was skipped; ends training if several in a row are."""
        assert self._config.optimizer is not None
        self._skipped_in_a_row += 1
        found = gather_json(finite.find_cause(batch, bad_logprobs, loss))
        cause = finite.name_cause(found, grad_norm)
        if dist.get_rank() == 0:
            self._log.warning(
                "optimizer_step_skipped", in_a_row=self._skipped_in_a_row, cause=cause
            )
        if self._skipped_in_a_row >= self._config.optimizer.max_skipped_steps:
            raise TrainingDiverged(
                f"{self._skipped_in_a_row} optimizer steps in a row had a gradient that is not "
                f"finite: {cause}",
                cause=cause,
                batch=batch,
                groups=found[dist.get_rank()]["groups"],
            )

    def _optimizer_step(self, weight: float) -> tuple[Tensor, float]:
        """Launches a step of gradients / weight, clipped; none if the weight is 0.

        Returns:
            The norm of gradients / weight, on the device, and the learning rate. The device skips
            the step if the norm is not finite.
        """
        optimizer, config = self.optimizer, self._config.optimizer
        assert optimizer is not None
        assert config is not None
        lr = config.learning_rate(self.steps_taken, self._total_train_steps)
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        if not parameters:
            raise InvalidInput(
                "the loss has a gradient, but not by the model's weights: expected a function of "
                "policy_logprobs that are not detached"
            )
        norm = gradients.total_norm([p.grad for p in parameters if p.grad is not None])
        norm = norm / max(weight, 1.0)
        if weight > 0:
            divisor = torch.full_like(norm, weight)
            if config.gradient_clipping > 0:
                divisor = divisor * ((norm + 1e-6) / config.gradient_clipping).clamp(min=1.0)
            for group in optimizer.param_groups:
                group["lr"] = lr
            gradients.step_with_divisor(optimizer, parameters, divisor, ~torch.isfinite(norm))
        optimizer.zero_grad(set_to_none=True)
        return norm, lr

    def read(self, batch: Batch, head: Head) -> tuple[Tensor, Tensor]:
        packing.check_batch(batch)
        self.model.check_images(batch, self._mesh.layout.per_share)
        self.model.check_tokens(batch)
        found: tuple[Tensor, ...] = ()
        with torch.no_grad():
            for index, mb in self._micro_batches(batch):
                *parts, _ = self._read(mb, head)
                if not found:
                    count = len(batch["input_ids"])
                    found = tuple(part.new_zeros(count, *part.shape[1:]) for part in parts)
                if index is not None:
                    where = packing.token_index(batch, index).to(self._device)
                    for whole, part in zip(found, parts, strict=True):
                        whole[where] = part
        if self._sharded:
            # The root keeps its gathered parameters after a forward; they would miss a later load.
            cast(FSDPModule, self.model).reshard()
        read, beside = (whole.to(batch["input_ids"].device) for whole in found)
        return read, beside

    def _micro_batches(self, batch: Batch) -> list[tuple[list[int] | None, Batch]]:
        """Splits this rank's share into as many micro-batches as all have; a dummy has no index."""
        spec = self._config.mb_spec
        count = spec.n_mbs
        # A larger smallest number can only make more bins: this ends at the largest number of bins
        # of any rank.
        while True:
            split = packing.split_micro_batches(
                batch, spec.max_tokens_per_mb, count, self.work.pair_cost
            )
            needed = {
                "n_max": float(max(len(split), 1)),
                "images_max": float(images.has_images(batch)),
            }
            needed = reduce_scalars(needed, self._mesh.data_group)
            largest, self._somewhere_images = int(needed["n_max"]), needed["images_max"] > 0
            if largest <= count or self._mesh.data_group is None:
                break
            count = largest
        chosen: list[tuple[list[int] | None, Batch]] = []
        for number in range(max(largest, 1)):
            if number < len(split):
                index = split[number]
                whole = len(split) == 1 and index == list(range(len(index)))
                chosen.append((index, batch if whole else packing.select(batch, index)))
            else:
                chosen.append((None, packing.dummy_like(batch)))
        return chosen

    def _to_device(self, tensor: Tensor) -> Tensor:
        """A copy that the device makes beside its work: from pinned memory."""
        if self._device.type != "cuda":
            return tensor
        return tensor.pin_memory().to(self._device, non_blocking=True)

    def _read(self, mb: Batch, head: Head) -> tuple[Tensor, Tensor, Batch]:
        """Returns a head's output for a micro-batch, full length, 0 where loss_mask is false.

        The layout is planned where the batch comes from, in host memory: the device never waits.

        Returns:
            Also the micro-batch on the device.
        """
        targets = torch.nonzero(mb["loss_mask"]).flatten()
        packed, shares = self.model.kernel == PACKED, self._config.share_prefixes
        least = 0.0 if packed or shares is not None else _WORTH_SHARING
        layout = self.model.plan(mb, share_prefixes=shares is not False, least=least)
        seen = None
        if images.has_images(mb):
            seen = vision.plan(self.model.hf, mb, layout).map(self._to_device)
        elif self._somewhere_images:
            seen = vision.blank(self.model.hf, layout).map(self._to_device)
        empty = not len(targets)
        # A micro-batch without loss tokens still takes part in the collectives of forward and
        # backward; it may be a single token, so it asks for its first.
        targets = targets.new_zeros(1) if empty else targets
        own = self.model.own_targets(layout, targets, head)
        own = None if own is None else self._to_device(own)
        layout, wanted = layout.map(self._to_device), self._to_device(targets)
        mb = {key: self._to_device(value) for key, value in mb.items()}
        read, beside = self.model(mb, layout, wanted, head, seen, own)
        if empty:
            read, beside = read * 0.0, beside * 0
        count = len(mb["input_ids"])
        placed = (
            part.new_zeros(count, *part.shape[1:]).index_copy(0, wanted, part)
            for part in (read, beside)
        )
        read, beside = placed
        return read, beside, mb
