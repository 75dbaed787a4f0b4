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
    """One model under training, sharded over all ranks of the trainer.

    Every rank calls the same methods in the same order, each with its own share of a packed batch.
    A method marked "collective" waits for all ranks: if one rank does not call it, the others fail
    after 5 x `rollout.setup_timeout_s`.
    """

    @property
    @abc.abstractmethod
    def rank(self) -> int:
        """Index of this process among all processes of the trainer."""

    @property
    @abc.abstractmethod
    def world_size(self) -> int:
        """Number of processes of the trainer."""

    @property
    @abc.abstractmethod
    def process_group(self) -> Any:
        """The torch process group for CPU tensors, whose ranks have different shares of a batch.

        None if all ranks have the same share.
        """

    @abc.abstractmethod
    def initialize(self, total_train_steps: int | None = None) -> None:
        """Joins the process group, loads and shards the model, and creates the optimizer.

        Args:
            total_train_steps: Planned number of optimizer steps, for the learning-rate schedule.
                None: a constant rate.
        """

    @abc.abstractmethod
    def destroy(self) -> None:
        """Finishes a background save, frees the model, and ends a process group that it started."""

    @abc.abstractmethod
    def accumulate(
        self,
        batch: Batch,
        loss_fn: LossFn,
        loss_weight_fn: LossWeightFn | None = None,
        *,
        head: Head | None = None,
    ) -> None:
        """Adds the gradients of a batch to those for the next `apply`; collective.

        Args:
            batch: This rank's share of the batch; may be empty.
            loss_fn: The loss of one micro-batch; it is called once for each.
            loss_weight_fn: Each micro-batch's weight in the divisor of the loss. None: its number
                of loss tokens.
            head: Computes the tensors that `loss_fn` gets. None: logprobs and entropies at
                temperature 1.

        Raises:
            CapacityExceeded: The device has too little memory; the message names settings that
                need less. The accumulated gradients are dropped, as after any error.
        """

    @abc.abstractmethod
    def apply(self) -> dict[str, float]:
        """Takes one optimizer step with the gradients that `accumulate` has added; collective.

        Returns:
            The statistics of `train_batch`, over all batches since the previous step.

        Raises:
            InvalidInput: No batch was accumulated.
            TrainingDiverged: For the same reason as `train_batch`; its `batch` is the last one.
        """

    def train_batch(
        self,
        batch: Batch,
        loss_fn: LossFn,
        loss_weight_fn: LossWeightFn | None = None,
        *,
        head: Head | None = None,
    ) -> dict[str, float]:
        """Takes one optimizer step on a batch: `accumulate`, then `apply`; collective.

        The loss is the sum over all micro-batches of all ranks, divided by the sum of their
        weights.

        Args:
            batch: This rank's share of the batch; may be empty.
            loss_fn: The loss of one micro-batch; it is called once for each.
            loss_weight_fn: Each micro-batch's weight in the divisor of the loss. None: its number
                of loss tokens.
            head: Computes the tensors that `loss_fn` gets. None: logprobs and entropies at
                temperature 1.

        Returns:
            A dict of statistics, equal on all ranks: `loss`, `grad_norm` (before clipping),
            `entropy`, `lr`, `n_tokens`, `n_loss_tokens`, `n_micro_batches`, and those that
            `loss_fn` returns. `skipped_steps` is 1 if the gradient norm was not finite; then the
            weights and the optimizer do not change. `seconds` is the step's time on the slowest
            rank; it includes `forward_seconds` and `backward_seconds`, both with their
            communication, and `optimizer_seconds`. `peak_gib` is the peak memory so far, in GiB, of
            the rank with the highest. `tokens_per_second` is included too and, on a known
            GPU, `mfu`: the share of the GPU's peak speed that the step reached (see
            `areal.engines.perf`).

        Raises:
            CapacityExceeded: For the same reason as `accumulate`.
            TrainingDiverged: Several gradients in a row were not finite (3 by default;
                `OptimizerConfig.max_skipped_steps`, which can be set only in code). Every rank
                raises it.
        """
        self.accumulate(batch, loss_fn, loss_weight_fn, head=head)
        return self.apply()

    @abc.abstractmethod
    def read(self, batch: Batch, head: Head | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns a head's two tensors at the loss tokens, 0 elsewhere; collective.

        Args:
            batch: This rank's share of the batch; may be empty.
            head: Computes the tensors (see `areal.engines.model.heads`). None: logprobs and
                entropies at temperature 1, both [T].

        Returns:
            Both tensors, [T, ...], without gradient.
        """

    def forward(self, batch: Batch, head: Head | None = None) -> torch.Tensor:
        """Returns the first tensor of `read`; without a `head`, the logprobs [T]; collective."""
        return self.read(batch, head)[0]

    @abc.abstractmethod
    def reduce_stats(self, sums: Mapping[str, torch.Tensor | float]) -> dict[str, float]:
        """Returns scalars that are combined over all ranks; collective.

        Args:
            sums: This rank's values, keyed by statistic. Names that end in `_max` are combined by
                maximum, all others by sum.
        """

    @abc.abstractmethod
    def get_version(self) -> int:
        """Returns the policy version, which is the number of finished train steps."""

    @abc.abstractmethod
    def set_version(self, version: int) -> None:
        """Sets the policy version, which checkpoints contain."""

    @abc.abstractmethod
    def iter_full_tensors(self, dtype: str | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the whole model's weights, tensor by tensor, on rank 0; collective.

        Every rank must run the iterator to its end. Rank 0 holds one bucket at a time (512 MiB, or
        one group of tensors that are converted together, such as a layer's experts) in addition to
        the tensors that the caller keeps. The other ranks never hold a whole tensor.

        Args:
            dtype: Type to which floating-point tensors are cast, such as `bfloat16`. None: as
                trained.

        Yields:
            On rank 0, pairs (name, CPU tensor): first the tensors that Hugging Face's
            `save_pretrained` writes, by the same names and shapes, tied weights once; then,
            unchanged, the other tensors of the model's folder, such as layers for speculative
            decoding. On other ranks, nothing.
        """

    @abc.abstractmethod
    def export(
        self,
        dtype: str | None,
        deliver: Callable[[tuple[HostTensor, ...], Again | None], None],
        *,
        twice: bool = False,
    ) -> Future[None]:
        """Gathers the weights on rank 0 in the background and delivers them; collective.

        The caller continues meanwhile. The next change of the weights (an optimizer step or `load`)
        waits until they have been gathered.

        Args:
            dtype: As for `iter_full_tensors`.
            deliver: A function that rank 0 calls in a thread, with the tensors of
                `iter_full_tensors` as bytes, and an object that gathers them again (None without
                `twice`).
            twice: True if the weights may be gathered again; the next change of the weights waits
                for that, too. Must be equal on all ranks.

        Returns:
            A future. On rank 0 it is done when `deliver` has returned or raised; on other ranks,
            when this rank has sent its part.
        """

    @abc.abstractmethod
    def save(self, directory: str | Path, dtype: str | None = None) -> None:
        """Saves the model and its tokenizer as a Hugging Face folder; collective.

        Args:
            directory: The folder, which rank 0 writes.
            dtype: As for `iter_full_tensors`.
        """

    @abc.abstractmethod
    def load(self, directory: str | Path) -> None:
        """Loads weights from a Hugging Face folder; the optimizer's state is kept; collective.

        Args:
            directory: A folder with a model of the same architecture.

        Raises:
            InvalidInput: A tensor is unknown, missing, or of another shape; no weight is changed.
        """

    @abc.abstractmethod
    def save_checkpoint(
        self,
        directory: str | Path,
        extra: Mapping[str, Any] | None = None,
        *,
        background: bool = False,
    ) -> Future[None]:
        """Writes a checkpoint from which a trainer can resume; collective.

        It contains weights, optimizer, learning-rate schedule, random states and policy version.

        Args:
            directory: The folder, which is written in place: write to a temporary name and rename
                it when the checkpoint is complete.
            extra: Additional data, JSON-serializable; `load_checkpoint` returns it.
            background: True: return as soon as the state is copied to CPU memory, and write it in a
                thread.

        Returns:
            A future that is done once this rank's part is written; without `background` it is done
            already. When the futures of all ranks are done, the checkpoint is complete.
        """

    @abc.abstractmethod
    def load_checkpoint(self, directory: str | Path) -> dict[str, Any]:
        """Restores a checkpoint, whatever the number of ranks that wrote it; collective.

        Args:
            directory: The checkpoint's folder.

        Returns:
            The `extra` that `save_checkpoint` got.
        """
