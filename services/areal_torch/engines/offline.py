"""The recipe's interface to a model that learns from rows only; it calls no service.

    row --> unit (one sequence, or the two of a pair) --> this rank's share, packed --> a step

Importing this module loads no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal.config.training import TrainEngineConfig
from areal.datasets.chats import Pair, Unit, check_units
from areal.datasets.loader import StatefulLoader
from areal.errors import InvalidInput
from areal.runs.evaluation_arguments import TAKEN
from areal.runs.metric_names import named, refuse_taken
from areal_torch.training.session import current_session

if TYPE_CHECKING:
    from areal_torch.algorithms.packing import Batch

_EVALUATED_AT_ONCE = 64


class OfflineTrainer:
    """A model trained on dataset rows only, without rollouts: for SFT, DPO and reward models.

    It is sharded over all ranks of the trainer and resumes from the run's newest checkpoint. Every
    rank must call the same methods in the same order.

    Example:
        >>> from areal_torch.engines.sft import train_lm
        >>> model = OfflineTrainer(config.actor)
        >>> for batch in model.batches(units):
        ...     model.finish_step(train_lm(model.engine, batch))
        >>> model.save()
    """

    def __init__(self, config: TrainEngineConfig, *, scalar: bool = False) -> None:
        """Loads the model, or its newest checkpoint if the run resumes.

        Args:
            config: The experiment's `actor` section; an empty `path` means `model.path`.
            scalar: True for a reward model, which returns one number per token instead of a
                distribution over the vocabulary.

        Raises:
            InvalidInput: Another model is already being trained.
        """
        from areal_torch.engines.fsdp import FSDPEngine

        session = current_session()
        self.session = session
        session.attach(self)
        config.path = config.path or session.config.model.path
        config.scalar = scalar
        self.engine = FSDPEngine(config)
        self.engine.initialize(total_train_steps=session.config.total_train_steps)
        if session.resumed is not None:
            self.engine.load_checkpoint(session.resumed.path)

    @property
    def step(self) -> int:
        """The number of finished steps."""
        return self.session.step

    def batches(self, units: Sequence[Unit]) -> Iterator[Batch]:
        """Yields this rank's share of the next `train_dataset.batch_size` units, once per step.

        The iterator ends after `total_train_steps` steps. Each epoch has its own order, which
        depends on `seed`. A resumed run continues with the next unit. Call `finish_step` after each
        batch.

        Args:
            units: The training data, each unit made by `chat_unit` or `pair_unit`, or all of
                them by `chat_units` or `pair_units`.

        Raises:
            InvalidInput: There are no units, one has more tokens or other ids than the model takes
                (the message names it, from 1), or `finish_step` was not called after a batch.
        """
        self._check(units)
        config = self.session.config
        loader = StatefulLoader([{"unit": unit} for unit in units], seed=config.seed)
        count = config.train_dataset.batch_size
        loader.seek(*divmod(self.step * count, len(units)))
        while self.step < config.total_train_steps:
            self.session.begin_step()
            self.session.status.training()
            before = self.step
            yield self.share([next(loader)[2]["unit"] for _ in range(count)])
            if self.step == before:
                raise InvalidInput("batches(): expected finish_step() after each batch")

    def chunks(self, units: Sequence[Unit]) -> Iterator[Batch]:
        """Yields this rank's share of all units in order, 64 units at a time, for evaluation.

        Pass all chunks to one call (`evaluate_lm(model.engine, model.chunks(units))`).
        """
        self._check(units)
        for begin in range(0, len(units), _EVALUATED_AT_ONCE):
            yield self.share(units[begin : begin + _EVALUATED_AT_ONCE])

    def _check(self, units: Sequence[Unit]) -> None:
        model = self.engine.model
        check_units(units, model.longest, model.vocab_size)

    def share(self, units: Sequence[Unit]) -> Batch:
        """Returns this rank's share of the units as a packed batch.

        If the units are pairs, the batch has the key `chosen`.
        """
        import torch

        from areal_torch.algorithms import packing

        lengths = [sum(len(each["input_ids"]) for each in unit) for unit in units]
        layout = self.engine.mesh.layout
        mine = packing.assign_groups(lengths, layout.data)[self.engine.rank // layout.per_share]
        sequences = [each for index in mine for each in units[index]]
        groups = [index for index in mine for _ in units[index]]
        if not sequences:  # a share of nothing has the keys and types of one with something
            whole = packing.pack(units[0])
            batch = packing.select(whole, [])
        else:
            batch = packing.pack(sequences, groups)
        if isinstance(units[0], Pair):
            batch["chosen"] = torch.arange(len(sequences)) % 2 == 0
        return batch

    def finish_step(self, stats: dict[str, float]) -> None:
        """Ends the step: writes its metrics and, if one is due, a checkpoint.

        Args:
            stats: The statistics that the training function returned.
        """
        self.session.row.update(named(stats))
        self.session.finish_step()
        self.engine.set_version(self.session.step)

    def record(self, name: str, value: float) -> None:
        """Records a result in the run's trainer.json and log.

        Args:
            name: The result's name. A later result with the same name replaces it.
            value: One number, such as `evaluate_lm` returns for all chunks together. A mean of
                the chunks' means would give rows of the last chunk more weight.

        Raises:
            InvalidInput: `value` is not a number, or the run has a figure or metric of this name.
        """
        if not isinstance(value, int | float):
            raise InvalidInput(
                f"record({name!r}): expected a number, got {type(value).__name__}; evaluate_lm "
                "and the like take model.chunks(...) and return one"
            )
        refuse_taken(name, "record")
        if name in TAKEN:
            raise InvalidInput(
                f"record: {name!r} is a figure of every run's summary: expected another name, such "
                f"as 'heldout_{name}'"
            )
        self.session.record(name, round(value, 4))

    def save(self, name: str = "model") -> Path:
        """Saves the model as a Hugging Face folder in the run folder and returns its path.

        All ranks must call it.

        Args:
            name: The folder's name inside the run folder.
        """
        folder = self.session.config.run_dir / name
        self.engine.save(folder)
        return folder

    def checkpoint_bytes(self) -> int:
        """Returns the size of a checkpoint's tensors, summed over all ranks."""
        return self.engine.checkpoint_bytes()

    def save_checkpoint(self, directory: Path) -> Future[None]:
        """Copies the training state, then writes it in the background.

        The state is that of the model, the optimizer and the random generators. Recipes
        rarely call this method, because `finish_step` saves checkpoints as set in the `checkpoint`
        section.

        Args:
            directory: The folder to which all ranks write their parts.

        Returns:
            A future that is done once this rank's part is written.
        """
        return self.engine.save_checkpoint(directory, background=True)


def frozen(config: Any, path: str = "") -> Any:
    """Returns an engine for a frozen model with the precision and layout of the trained one.

    Args:
        config: The experiment's `actor` section.
        path: A Hugging Face folder; "": `model.path`.
    """
    from areal.config.training import RefConfig
    from areal_torch.engines.fsdp import FSDPEngine

    reference = RefConfig(
        path=path or current_session().config.model.path,
        dtype=config.dtype,
        mb_spec=config.mb_spec,
        kernels=config.kernels,
        attn_impl=config.attn_impl,
        layout=config.layout,
        distributed_timeout_seconds=config.distributed_timeout_seconds,
    )
    engine = FSDPEngine(reference)
    engine.initialize()
    return engine
