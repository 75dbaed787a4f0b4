"""One optimizer step over all ranks, or a forward pass, in micro-batches by token budget.

    this rank's batch
          | split by tokens, into as many micro-batches as the rank that needs most
          v                        (a rank with fewer runs two dummy tokens with weight 0)
    forward, packed, prefixes once -> logprobs at loss tokens -> loss_fn -> loss sum
          |
          v
    backward of loss sum x ranks / W           (W: loss tokens of all micro-batches of all
          |                                     shares; FSDP averages gradients over ranks)
          v
    global gradient norm -> clip -> AdamW, or skip if it is not finite; several in a row: the end

| consumes | waits for | unblocked by |
|---|---|---|
| a share of a batch | the other ranks | every rank calling the same method; the timeout |
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import Tensor

from areal.algorithms import packing
from areal.algorithms.packing import Batch
from areal.chassis.logging import get_logger
from areal.config.training import OptimizerConfig, RefConfig, TrainEngineConfig
from areal.engines import finite
from areal.engines.model.attention.packed import build_layout
from areal.engines.model.packed import PackedCausalLM
from areal.engines.parallel import gradients
from areal.engines.parallel.mesh import Mesh, reduce_scalars
from areal.engines.train_api import LossFn, LossWeightFn
from areal.errors import InvalidInput, TrainingDiverged
from areal.training.ranks import gather_json


def count_loss_tokens(batch: Batch) -> int:
    """Return the number of loss tokens of a batch."""
    return int(batch["loss_mask"].sum())


class TrainStep:
    """Computes with one model, and trains it if there is an optimizer; all methods are collective.

    `train` and `forward` are `TrainEngine.train_batch` and `TrainEngine.forward`.
    """

    def __init__(
        self,
        model: PackedCausalLM,
        config: TrainEngineConfig | RefConfig,
        device: torch.device,
        mesh: Mesh,
        *,
        sharded: bool,
        total_train_steps: int | None,
    ) -> None:
        """Makes the optimizer, if the configuration has one.

        Args:
            model: on its device, sharded if it is to be.
            config: the engine's.
            device: that batches are computed on.
            mesh: the ranks that share model and batch.
            sharded: gradients are averaged over ranks.
            total_train_steps: for the learning-rate schedule; None: a constant rate.
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
        self._total_train_steps = total_train_steps
        self._skipped_in_a_row = 0
        self._log = get_logger("areal.engines.step")

    def train(
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
        counts = reduce_scalars(
            {"weight": float(sum(weight_of)), "tokens": float(len(batch["input_ids"]))},
            self._mesh.data_group,
        )
        total_weight = counts["weight"]
        # FSDP averages gradients over ranks; the loss is a sum over their tokens.
        scale = (self._mesh.layout.averaged if self._sharded else 1) / max(total_weight, 1.0)
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
        reduced = reduce_scalars(sums, self._mesh.data_group)
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

    def _optimizer_step(self, *, apply: bool) -> tuple[float, float, bool]:
        """Clip and step; returns the gradient norm, the learning rate, and whether it stepped."""
        optimizer, config = self.optimizer, self._config.optimizer
        assert optimizer is not None
        assert config is not None
        lr = config.learning_rate(self.steps_taken, self._total_train_steps)
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        norm = gradients.total_norm([p.grad for p in parameters if p.grad is not None])
        grad_norm = float(norm)
        stepped = apply and bool(torch.isfinite(norm))
        if stepped:
            if config.gradient_clipping > 0:
                gradients.clip(parameters, config.gradient_clipping, norm)
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
            self.steps_taken += 1
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
                    result[packing.token_index(batch, index).to(self._device)] = logprobs
        if self._sharded:
            # The root keeps its gathered parameters after a forward; they would miss a later load.
            self.model.reshard()  # type: ignore[operator]
        assert result is not None
        return result.to(batch["input_ids"].device)

    def _micro_batches(self, batch: Batch) -> list[tuple[list[int] | None, Batch]]:
        """Split this rank's share into as many micro-batches as all ranks; a dummy has no index."""
        spec = self._config.mb_spec
        count = spec.n_mbs
        # A larger smallest number can only make more bins: this ends at the largest number of bins
        # of any rank.
        while True:
            split = packing.split_micro_batches(batch, spec.max_tokens_per_mb, count)
            needed = {"n_max": float(max(len(split), 1))}
            largest = int(reduce_scalars(needed, self._mesh.data_group)["n_max"])
            if largest <= count or self._mesh.data_group is None:
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
        return {key: value.to(self._device, non_blocking=True) for key, value in batch.items()}

    def _logprobs(self, mb: Batch, temperature: float) -> tuple[Tensor, Tensor]:
        """Logprobs and entropies of a micro-batch, full length, 0 where loss_mask is false."""
        targets = torch.nonzero(mb["loss_mask"]).flatten()
        layout = build_layout(
            mb, share_prefixes=self._config.share_prefixes and not self.model.flash
        )
        # A micro-batch without loss tokens still takes part in the collectives of forward and
        # backward; it may be a single token, so it asks for its first.
        wanted = targets if len(targets) else targets.new_zeros(1)
        logprobs, entropies = self.model(mb, layout, wanted, temperature)
        if not len(targets):
            logprobs = logprobs * 0.0
        zeros = logprobs.new_zeros(len(mb["input_ids"]))
        entropies = torch.where(mb["loss_mask"], zeros.index_copy(0, wanted, entropies), 0.0)
        return zeros.index_copy(0, wanted, logprobs), entropies


def make_optimizer(model: PackedCausalLM, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW; norms and biases do not decay."""
    # Fused AdamW takes tensors of one mesh at a time.
    groups = [
        {"params": chosen, "weight_decay": decay}
        for same in gradients.by_mesh(model.parameters())
        for decay, chosen in (
            (config.weight_decay, [p for p in same if p.ndim >= 2]),
            (0.0, [p for p in same if p.ndim < 2]),
        )
        if chosen
    ]
    return torch.optim.AdamW(
        groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=True
    )
