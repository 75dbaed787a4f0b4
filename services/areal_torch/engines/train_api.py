"""What a training engine does; importing this needs no torch."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from areal.weights.publisher import Again
    from areal.weights.safetensors import HostTensor
    from areal_torch.algorithms.packing import Batch
    from areal_torch.engines.model.heads import Head

LossFn = Callable[
    ["torch.Tensor", "torch.Tensor", "Batch"], tuple["torch.Tensor", dict[str, "torch.Tensor"]]
]
"""(logprobs [T] with gradient, entropies [T], micro-batch) -> (loss sum, statistics).

With a head other than that of logprobs, the head's values, [T, ...], are in their place.

See `areal_torch.algorithms.losses` for what the sum and the statistics mean.
"""

LossWeightFn = Callable[["Batch"], int]
"""Micro-batch -> what its loss sum counts for in the divisor: the number of its loss tokens."""


def as_batches(batches: Batch | Iterable[Batch]) -> Iterable[Batch]:
    """Returns the batches of an argument that may be a single one."""
    return [batches] if isinstance(batches, dict) else batches


class TrainEngine(abc.ABC):
    """One model under training, sharded over all ranks of the trainer.

    Every rank must call the same methods in the same order, each with its own share of a packed
    batch. A method marked "collective" waits for all ranks: if one rank does not call it, the
    others fail after 5 x `rollout.setup_timeout_s` (if that is null: 600 s, or 1800 s on GPUs).
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
        """The torch process group of the ranks that have different shares of a batch.

        It is for CPU tensors. None if there is only one share.
        """

    @abc.abstractmethod
    def initialize(self, total_train_steps: int | None = None) -> None:
        """Joins the process group, loads and shards the model, and creates the optimizer.

        Args:
            total_train_steps: Planned number of optimizer steps, for the learning-rate schedule.
                None means a constant rate.
        """

    @abc.abstractmethod
    def destroy(self) -> None:
        """Waits for a background save, then frees the model.

        If the engine started the process group, it also ends the group.
        """

    @abc.abstractmethod
    def accumulate(
        self,
        batch: Batch,
        loss_fn: LossFn,
        loss_weight_fn: LossWeightFn | None = None,
        *,
        head: Head | None = None,
    ) -> None:
        """Adds the gradients of a batch to those that the next `apply` uses; collective.

        Args:
            batch: This rank's share of the batch; may be empty.
            loss_fn: Computes the loss of a micro-batch; called once for each micro-batch.
            loss_weight_fn: Computes a micro-batch's weight in the divisor of the loss. By
                default, the weight is the number of loss tokens.
            head: Computes the tensors that `loss_fn` gets. By default, these are logprobs and
                entropies at temperature 1.

        Raises:
            InvalidInput: The engine has no optimizer, or the batch is malformed.
            CapacityExceeded: The device has too little memory; the message names settings that
                need less. The accumulated gradients are dropped.
        """

    @abc.abstractmethod
    def apply(self) -> dict[str, float]:
        """Takes one optimizer step with the accumulated gradients; collective.

        Returns:
            The statistics that `train_batch` returns, over all batches since the previous step.

        Raises:
            InvalidInput: No batch was accumulated.
            TrainingDiverged: As in `train_batch`, the gradients of several steps in a row were not
                finite. The error's `batch` is the last one accumulated.
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

        The loss is the sum of the losses of all micro-batches on all ranks, divided by the sum of
        the micro-batches' weights.

        Args:
            batch: This rank's share of the batch; may be empty.
            loss_fn: Computes the loss of a micro-batch; called once for each micro-batch.
            loss_weight_fn: Computes a micro-batch's weight in the divisor of the loss. By
                default, the weight is the number of loss tokens.
            head: Computes the tensors that `loss_fn` gets. By default, these are logprobs and
                entropies at temperature 1.

        Returns:
            A dict of statistics, equal on all ranks:

            - `loss`, `grad_norm` (before clipping), `entropy`, `lr`, `n_tokens`, `n_loss_tokens`,
              `n_micro_batches`, `tokens_per_second`, and the statistics that `loss_fn` returns.
            - `skipped_steps`: 1 if the gradient norm was not finite or there were no loss tokens.
              In that case, the weights and the optimizer's state do not change.
            - `seconds`: the step's time on the slowest rank. It includes `forward_seconds` and
              `backward_seconds`, which cover communication too, and `optimizer_seconds`.
            - `peak_gib`: the highest peak memory of any rank so far, in GiB.
            - `mfu`, on a known GPU: the share of the GPU's peak speed that the step reached (see
              `areal_torch.engines.perf`).

        Raises:
            InvalidInput: `accumulate` raised it.
            CapacityExceeded: `accumulate` raised it.
            TrainingDiverged: The gradients of several steps in a row were not finite. The limit is
                3 steps by default (`OptimizerConfig.max_skipped_steps`, which can be set only in
                code). Every rank raises this error.
        """
        self.accumulate(batch, loss_fn, loss_weight_fn, head=head)
        return self.apply()

    @abc.abstractmethod
    def read(self, batch: Batch, head: Head | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns a head's two tensors, computed at the loss tokens and 0 elsewhere; collective.

        Args:
            batch: This rank's share of the batch; may be empty.
            head: Computes the tensors (see `areal_torch.engines.model.heads`). By default, these
                are logprobs and entropies at temperature 1, both [T].

        Returns:
            The two tensors, [T, ...], without gradient.
        """

    def forward(self, batch: Batch, head: Head | None = None) -> torch.Tensor:
        """Returns the first tensor of `read`, which is the logprobs [T] by default; collective."""
        return self.read(batch, head)[0]

    @abc.abstractmethod
    def reduce_stats(self, sums: Mapping[str, torch.Tensor | float]) -> dict[str, float]:
        """Returns scalar statistics combined over all ranks; collective.

        Args:
            sums: This rank's values, by name. The result is the maximum over the ranks for a name
                that ends in `_max`, and the sum for any other.
        """

    @abc.abstractmethod
    def get_version(self) -> int:
        """Returns the policy version, which is the number of finished train steps."""

    @abc.abstractmethod
    def set_version(self, version: int) -> None:
        """Sets the policy version, which is saved in checkpoints."""

    @abc.abstractmethod
    def iter_full_tensors(self, dtype: str | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the weights of the whole model, one tensor at a time, on rank 0; collective.

        Every rank must run the iterator to its end. Besides the tensors that the caller keeps, rank
        0 holds one bucket at a time: up to 512 MiB, or a larger set of tensors that must be
        converted together, such as a layer's experts. The other ranks never hold a whole tensor.

        Args:
            dtype: Type to which floating-point tensors are cast, such as `bfloat16`. If None, they
                are not cast.

        Yields:
            On rank 0, pairs (name, CPU tensor). First come the tensors that Hugging Face's
            `save_pretrained` writes, with the same names and shapes; tied weights come only once.
            Then come tensors of the model's folder that the model does not load, such as layers
            for speculative decoding; these are not cast. The other ranks yield nothing.
        """

    @abc.abstractmethod
    def export(
        self,
        dtype: str | None,
        deliver: Callable[[tuple[HostTensor, ...], Again | None], None],
        *,
        twice: bool = False,
        adapters: bool = False,
    ) -> Future[None]:
        """Gathers the weights on rank 0 in the background and delivers them; collective.

        The call does not wait for the gathering, but the next change of the weights (an optimizer
        step or a load) does.

        Args:
            dtype: Same as in `iter_full_tensors`.
            deliver: A function that rank 0 calls in a thread. Its arguments are the tensors of
                `iter_full_tensors`, as bytes, and an object that gathers them again (None if
                `twice` is False, or if several GPUs gather in order).
            twice: Whether the weights may be gathered again. If so, the next change of the weights
                waits for that, too. Must be equal on all ranks.
            adapters: Whether only the LoRA adapters are gathered, with the names that peft reads,
                and not the model with them. Must be equal on all ranks.

        Returns:
            A future. On rank 0, it is done when `deliver` has returned or raised an error. On each
            other rank, it is done when the rank has sent its part.
        """

    @abc.abstractmethod
    def save(self, directory: str | Path, dtype: str | None = None) -> None:
        """Saves the model and its tokenizer as a Hugging Face folder; collective.

        Args:
            directory: The folder; rank 0 writes it.
            dtype: Same as in `iter_full_tensors`.
        """

    @abc.abstractmethod
    def load(self, directory: str | Path) -> None:
        """Loads weights from a Hugging Face folder and keeps the optimizer's state; collective.

        Args:
            directory: A folder with a model of the same architecture.

        Raises:
            InvalidInput: A tensor is unknown or missing, or has the wrong shape. No weight is
                changed.
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

        The checkpoint contains the weights, the policy version, and the states of the optimizer,
        the learning-rate schedule and the random generators.

        Args:
            directory: The folder. It is written in place, so use a temporary name and rename the
                folder when the checkpoint is complete.
            extra: Additional JSON-serializable data; `load_checkpoint` returns it.
            background: If True, the call returns as soon as the state is copied to CPU memory, and
                a thread writes it. If False, the call returns when this rank's part is written.

        Returns:
            A future that is done when this rank's part is written. When the futures of all ranks
            are done, the checkpoint is complete.
        """

    @abc.abstractmethod
    def load_checkpoint(self, directory: str | Path) -> dict[str, Any]:
        """Restores a checkpoint, which any number of ranks may have written; collective.

        Args:
            directory: The checkpoint's folder.

        Returns:
            The `extra` that was passed to `save_checkpoint`.

        Raises:
            InvalidInput: The checkpoint is incomplete or belongs to another model.
        """
