"""What a training engine does; importing this needs no torch."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from areal.algorithms.packing import Batch
    from areal.engines.model.heads import Head
    from areal.weights.publisher import Again
    from areal.weights.safetensors import HostTensor

LossFn = Callable[
    ["torch.Tensor", "torch.Tensor", "Batch"], tuple["torch.Tensor", dict[str, "torch.Tensor"]]
]
"""(logprobs [T] with gradient, entropies [T], micro-batch) -> (loss sum, statistics).

With another head than that of logprobs, what that reads, [T, ...], is in their place.

See `areal.algorithms.losses` for what the sum and the statistics mean."""

LossWeightFn = Callable[["Batch"], int]
"""Micro-batch -> what its loss sum counts for in the divisor: the number of its loss tokens."""


class TrainEngine(abc.ABC):
    """One model under training, spread over all ranks of the job.

    Every rank calls the same methods in the same order, each with its own share of a batch (see
    `areal.algorithms.packing`). Methods that compute or save are collective: a rank that does not
    call them makes the others wait until the collective deadline.
    """

    @property
    @abc.abstractmethod
    def rank(self) -> int:
        """Index of this process in the job."""

    @property
    @abc.abstractmethod
    def world_size(self) -> int:
        """Number of processes in the job."""

    @property
    @abc.abstractmethod
    def process_group(self) -> Any:
        """The ranks with different shares of a batch, for CPU tensors; None if all share one."""

    @abc.abstractmethod
    def initialize(self, total_train_steps: int | None = None) -> None:
        """Join the process group, load and shard the model, and create the optimizer.

        Args:
            total_train_steps: planned optimizer steps, for the learning-rate schedule; None: a
                constant rate.
        """

    @abc.abstractmethod
    def destroy(self) -> None:
        """Finish a background save, free the model, and leave the process group if joined."""

    @abc.abstractmethod
    def accumulate(
        self,
        batch: Batch,
        loss_fn: LossFn,
        loss_weight_fn: LossWeightFn | None = None,
        *,
        head: Head | None = None,
    ) -> None:
        """Add a batch's gradients to those that the next `apply` uses; collective.

        Args:
            batch: this rank's share; may be empty.
            loss_fn: called once per micro-batch.
            loss_weight_fn: default: the number of loss tokens.
            head: computes what the loss gets; None: logprobs and entropies at temperature 1.

        Raises:
            CapacityExceeded: the device has too little memory; the message says which settings need
                less. The accumulated gradients are dropped, as after any error.
        """

    @abc.abstractmethod
    def apply(self) -> dict[str, float]:
        """Take an optimizer step with what `accumulate` has added up; collective.

        Returns:
            The same statistics as `train_batch`, over all batches since the last step.

        Raises:
            InvalidInput: no batch was accumulated.
            TrainingDiverged: for the same reason as `train_batch`; it carries the last batch.
        """

    def train_batch(
        self,
        batch: Batch,
        loss_fn: LossFn,
        loss_weight_fn: LossWeightFn | None = None,
        *,
        head: Head | None = None,
    ) -> dict[str, float]:
        """Take one optimizer step, `accumulate` and `apply`; collective.

        The loss is the sum over all micro-batches of all ranks, divided by the sum of their
        weights.

        Args:
            batch: this rank's share; may be empty.
            loss_fn: called once per micro-batch.
            loss_weight_fn: default: the number of loss tokens.
            head: computes what the loss gets; None: logprobs and entropies at temperature 1.

        Returns:
            Equal on all ranks: `loss`, `grad_norm` (before clipping), `entropy`, `lr`, `n_tokens`,
            `n_loss_tokens`, `n_micro_batches`, `skipped_steps` (1 if the gradient norm was not
            finite, in which case the weights and the optimizer are left as they were), each of the
            loss's statistics. Of the slowest rank: `seconds`, which include `forward_seconds`,
            `backward_seconds` (both with their communication) and `optimizer_seconds`; and
            `peak_gib`, the peak memory so far. Also `tokens_per_second`, and on a known GPU `mfu`
            (see `areal.engines.perf`).

        Raises:
            TrainingDiverged: on every rank, when `optimizer.max_skipped_steps` steps in a row were
                skipped because their gradient was not finite.
        """
        self.accumulate(batch, loss_fn, loss_weight_fn, head=head)
        return self.apply()

    @abc.abstractmethod
    def read(self, batch: Batch, head: Head | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what a head computes at each token with `loss_mask`, 0 elsewhere; collective.

        Args:
            batch: this rank's share; may be empty.
            head: None: logprobs and entropies, both [T], at temperature 1.

        Returns:
            Both tensors of the head, [T, ...], without gradient; see `areal.engines.model.heads`.
        """

    def forward(self, batch: Batch, head: Head | None = None) -> torch.Tensor:
        """Return the first tensor of `read`: with no `head`, logprobs [T]."""
        return self.read(batch, head)[0]

    @abc.abstractmethod
    def reduce_stats(self, sums: Mapping[str, torch.Tensor | float]) -> dict[str, float]:
        """Combine scalars over ranks: names that end in `_max` by maximum, all others by sum."""

    @abc.abstractmethod
    def get_version(self) -> int:
        """Return the policy version: finished train steps."""

    @abc.abstractmethod
    def set_version(self, version: int) -> None:
        """Set the policy version (checkpoints contain it)."""

    @abc.abstractmethod
    def iter_full_tensors(self, dtype: str | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Gather the weights for export; collective: every rank runs it to its end.

        Rank 0 holds one bucket at a time (512 MiB, or one group of tensors that are converted
        together, such as a layer's experts), besides what the caller keeps. The others never hold a
        whole tensor.

        Args:
            dtype: `float32`, `bfloat16`, ... to cast floating tensors to; None: as trained.

        Yields:
            On rank 0, pairs (name, CPU tensor), exactly those that `save_pretrained` writes: the
            Hub's names and shapes, tied weights once. Then, unchanged, the other tensors of the
            model's directory (layers for speculative decoding, say). On other ranks nothing.
        """

    @abc.abstractmethod
    def export(
        self,
        dtype: str | None,
        deliver: Callable[[tuple[HostTensor, ...], Again | None], None],
        *,
        twice: bool = False,
    ) -> Future[None]:
        """Gather the weights in the background while the caller continues; collective.

        Only the next change of the weights (an optimizer step, `load`) waits until they have been
        gathered.

        Args:
            dtype: see `iter_full_tensors`.
            deliver: called in a thread of rank 0 with the tensors that `iter_full_tensors` yields,
                as bytes. With `twice` it also gets a function that gathers them again; the next
                change of the weights waits for that, too.
            twice: the same on every rank.

        Returns:
            A future. On rank 0 it is done when `deliver` has returned or raised; on other ranks,
            when this rank has sent its part.
        """

    @abc.abstractmethod
    def save(self, directory: str | Path, dtype: str | None = None) -> None:
        """Write a Hugging Face directory, tokenizer included; collective, rank 0 writes."""

    @abc.abstractmethod
    def load(self, directory: str | Path) -> None:
        """Load weights from a Hub directory of the same architecture; the optimizer is kept.

        Raises:
            InvalidInput: a tensor is unknown, missing, or of another shape; nothing is changed.
        """

    @abc.abstractmethod
    def save_checkpoint(
        self,
        directory: str | Path,
        extra: Mapping[str, Any] | None = None,
        *,
        background: bool = False,
    ) -> Future[None]:
        """Write what a resume needs; collective.

        Weights, optimizer, schedule, random states and version.

        Args:
            directory: written to directly; the caller renames it into place.
            extra: JSON-serializable; returned by `load_checkpoint`.
            background: return once the state is copied to CPU memory; a thread writes it.

        Returns:
            A future that is done once this rank's part is written (already done without
            `background`). When the futures of all ranks are done, the checkpoint is complete.
        """

    @abc.abstractmethod
    def load_checkpoint(self, directory: str | Path) -> dict[str, Any]:
        """Resume from a checkpoint that any number of ranks wrote; collective.

        Returns:
            The `extra` it was saved with.
        """
