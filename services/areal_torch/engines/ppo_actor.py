"""The recipe's interface to the policy under training: PPO, and publishing of weights.

Importing this module loads no torch: recipes name the class, and workers load recipes too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal.chassis.logging import get_logger
from areal.config.training import PPOActorConfig, RefConfig
from areal.config.transports import transport_named
from areal.errors import InvalidInput, TrainingDiverged
from areal.model_directory import serving_dtype
from areal.runs.metric_names import named
from areal.types import WeightUpdateMeta
from areal.weights.manifest import build_manifest
from areal.weights.publisher import Again, NewVersion, Publisher
from areal.weights.served_adapters import served_adapters
from areal_torch.engines.export.publishing import make_publisher
from areal_torch.training.session import current_session

if TYPE_CHECKING:
    from torch import Tensor

    from areal.weights.safetensors import HostTensor
    from areal_torch.algorithms.packing import Batch
    from areal_torch.engines.distill import Distillation
    from areal_torch.engines.model.heads import Head
    from areal_torch.engines.model.lora import Described


class FSDPPPOActor:
    """The policy under training, sharded over all ranks of the trainer.

    It resumes from the run's newest checkpoint. Every rank must call the same methods in the same
    order.

    `FSDPPPOActor(config.ref)` creates a frozen reference model instead. The reference is loaded
    from `ref.path` (if empty, `model.path`) each time the run starts. It is never published or
    saved in a checkpoint. With `actor.lora` and no `ref.path`, the reference is the actor without
    its adapters.

    Example:
        >>> actor = FSDPPPOActor(config.actor)
        >>> ref = FSDPPPOActor(config.ref)
        >>> batch["reference_logprobs"] = ref.compute_logprobs(batch)  # before compute_advantages
        >>> actor.compute_advantages(batch)  # subtracts the KL penalty
    """

    def __init__(
        self,
        config: PPOActorConfig | RefConfig | None,
        *,
        loss: Callable[..., Any] | None = None,
        advantages: Callable[..., Any] | None = None,
        head: Head | None = None,
    ) -> None:
        """Loads the model, or its newest checkpoint if the run resumes.

        Args:
            config: The experiment's `actor` or `ref` section; an empty `path` means `model.path`.
            loss: A loss of the recipe's own, in place of `actor.loss_type`. It takes any of
                `policy_logprobs` (with gradient), `proximal_logprobs`, `behavior_logprobs`,
                `advantages`, `entropies`, `loss_mask`, `cu_seqlens` and the other keys of the
                batch, and `eps_clip`, `eps_clip_higher` and `c_clip` of the `actor` section. It
                returns a loss for each token, float [T], or that and a dict of statistics [T].
                `functools.partial` sets its constants.
            advantages: An advantage function of the recipe's own, in place of `reward_norm` and
                GAE. It takes any of `rewards` (float64 [S]: each sequence's, after penalties,
                scaling and clipping), `token_rewards` (float64 [T]: the same on tokens, with the
                KL penalty), `reduce_stats` and the keys of the batch. It returns [S] or [T].
            head: What computes logprobs and entropies from hidden states (see
                `areal_torch.engines.model.heads`), [N] each.

        Raises:
            InvalidInput: `config` is None, another model is already being trained, a reference
                that shares the actor's model (with LoRA) is created before the actor, or `loss` or
                `advantages` is not a function.
        """
        if config is None:
            raise InvalidInput(
                "FSDPPPOActor(None): expected a section; for a reference model, set ref={}"
            )
        from areal_torch.engines import random_state
        from areal_torch.engines.fsdp import FSDPEngine
        from areal_torch.engines.ppo import PPOActor

        session = current_session()
        self.session = session
        self.frozen = config.optimizer is None
        if not self.frozen:
            session.attach(self)
        self._publisher: tuple[WeightUpdateMeta, Publisher] | None = None
        self._adapters = False
        self._described: Described | None = None
        self._is_base = self.frozen and not config.path and session.config.actor.lora is not None
        if self._is_base:
            self._share(session.actor)
            return
        config.path = config.path or session.config.model.path
        # A reference is compared with the actor: as the actor computes.
        ppo = config if isinstance(config, PPOActorConfig) else session.config.actor
        config.dtype, config.mb_spec = ppo.dtype, ppo.mb_spec
        config.kernels, config.attn_impl = ppo.kernels, ppo.attn_impl
        config.distributed_timeout_seconds = ppo.distributed_timeout_seconds
        self.engine = FSDPEngine(config)
        self._ppo = PPOActor(
            ppo,
            self.engine,
            session.config.gconfig.temperature,
            loss=loss,
            advantages=advantages,
            head=head,
        )
        steps = session.config.total_train_steps * ppo.ppo_n_minibatches
        session.turn.admit(self.engine)
        self.engine.initialize(total_train_steps=None if self.frozen else steps)
        if self.frozen:
            return
        self.engine.taken = []
        self._adapters = self._publishes_adapters()
        session.pair_cost = self.engine.step.work.pair_cost
        if session.resumed is not None:
            # Until its first step, a resumed recipe draws the same numbers as at its first start.
            drawn = random_state.capture()
            self.engine.load_checkpoint(session.resumed.path)
            session.before_first_step = partial(random_state.restore, random_state.capture())
            random_state.restore(drawn)
        self.engine.set_version(session.step)
        if session.any_rank(session.rank == 0 and session.step > session.published_version):
            # The checkpoint was complete before the version was published, or Redis is new: nothing
            # serves, or knows, the weights to continue from.
            self._publish(WeightUpdateMeta(), session.step)
            session.publishing.settle()

    def _publishes_adapters(self) -> bool:
        """Whether versions are adapters; the same on every rank."""
        from areal_torch.engines.model.lora import trained_beside

        config = self.session.config
        if config.actor.lora is None:
            return False
        _, why = served_adapters(config)
        if beside := trained_beside(self.engine.model.hf):
            why = why or f"{beside[0]} is trained whole"
        if self.session.rank == 0:
            log = get_logger(__name__)
            log.info("lora_published", form="merged" if why else "adapter", cause=why)
        return not why

    def _share(self, actor: object) -> None:
        """Computes with the actor's model."""
        if not isinstance(actor, FSDPPPOActor):
            raise InvalidInput(
                "FSDPPPOActor(config.ref): expected FSDPPPOActor(config.actor) first, because with "
                "actor.lora and no ref.path the reference is the actor without its adapters"
            )
        self.engine, self._ppo = actor.engine, actor._ppo

    def get_version(self) -> int:
        """Returns the number of finished train steps, from which a resumed run's loop continues."""
        return self.engine.get_version()

    def compute_logprobs(self, batch: Batch) -> Tensor:
        """Returns the logprobs of the loss tokens under this model, float32 [T]; 0 elsewhere.

        The logprobs have no gradient. They are computed at the sampling temperature,
        `gconfig.temperature`.
        """
        if not self._is_base:
            return self._ppo.compute_logprobs(batch)
        with self.engine.without_adapters():
            return self._ppo.compute_logprobs(batch)

    def compute_advantages(
        self, batch: Batch, advantages: Callable[..., Any] | None = None
    ) -> None:
        """Adds `advantages` and `returns` to a batch, both float32 [T] and 0 except on loss tokens.

        The method shapes the rewards, subtracts the KL penalty, computes advantages by generalized
        advantage estimation (GAE), and normalizes them, as set in the `actor` section.

        Args:
            batch: A batch from `RemoteSGLangEngine.prepare_batch`. It also needs
                `reference_logprobs` if `actor.kl_ctl` is not 0, and `values` if there is a critic;
                both are float32 [T].
            advantages: An advantage function for this call, as for the class.

        Raises:
            InvalidInput: The batch lacks a key that the `actor` section or the critic requires, or
                `advantages` returned something of another shape.
            WorkflowError: `advantages` raised, or returned numbers that are not finite.
        """
        self._ppo.compute_advantages(batch, advantages)
        found = batch["advantages"]
        self.session.advantages = lambda: found.numpy(force=True)

    def ppo_update(self, batch: Batch, loss: Callable[..., Any] | None = None) -> dict[str, float]:
        """Updates the policy on a batch with advantages and returns the step's metrics.

        Args:
            batch: A batch after `compute_advantages`.
            loss: A loss for this call, as for the class.

        Returns:
            Metrics of the batch, the loss and the optimizer, under their names in docs/metrics.md,
            such as `reward/mean`, `train/loss` and `policy/kl`. They are equal on all ranks, and
            are also written to the step's row in metrics.jsonl.

        Raises:
            TrainingDiverged: Several gradients in a row were not finite. The limit is 3 by default
                (`OptimizerConfig.max_skipped_steps`, which can be set only in code). The batch is
                saved in the run folder (see `areal_torch.engines.failed_step`); no weights are
                published.
            InvalidInput: The loss returned something that is not one number per token, or that has
                no gradient.
            WorkflowError: The loss raised.
        """
        start = time.monotonic()
        try:
            stats = self._ppo.ppo_update(batch, loss)
        except TrainingDiverged as error:
            from areal_torch.engines import failed_step

            settings = failed_step.settings_of(
                self._ppo.config,
                self._ppo.temperature,
                failed_step.describe_loss(self._ppo, loss),
            )
            raise failed_step.keep(error, self.session, actor=settings) from None
        return self._enter(stats, start)

    def record(self, numbers: Mapping[str, float]) -> None:
        """Puts numbers of the recipe's own into the row of the step in progress.

        The row is in metrics.jsonl, the tracker, `areal status --json` and the dashboard.

        Args:
            numbers: By name, such as `{"my/share_of_tools": 0.5}`. Of several ranks, the numbers
                of rank 0 count; `actor.engine.reduce_stats` adds them up over all ranks. NaN and
                infinities are null in metrics.jsonl.

        Raises:
            InvalidInput: No step is in progress, a name is in the row already (metrics of every
                step, statistics of the loss), or a value is not a number of 64 bits.
        """
        self.session.note(numbers)

    def distill(self, batch: Batch, distillation: Distillation) -> dict[str, float]:
        """Updates the policy toward a teacher's distribution and returns the step's metrics.

        Args:
            batch: A batch from `RemoteSGLangEngine.prepare_batch`, after
                `distillation.ask(teacher, batch)`.
            distillation: An `areal_torch.engines.distill.Distillation`. It sets how many token
                ids are compared at each position, the direction of the KL divergence, and the
                temperature.

        Returns:
            The metrics of `ppo_update`, except those that only PPO has. `train/loss` is the mean KL
            divergence per loss token.

        Raises:
            TrainingDiverged: Several gradients in a row were not finite. The limit is 3 by default
                (`OptimizerConfig.max_skipped_steps`, which can be set only in code).
            InvalidInput: `distillation.ask` was not called on this batch.
        """
        start = time.monotonic()
        stats = self._ppo.describe(batch) | distillation.train(self.engine, batch)
        del stats["advantage_abs"]
        return self._enter(stats, start)

    def upload_weights(self, meta: WeightUpdateMeta) -> None:
        """Publishes the new policy version to the inference servers and ends the train step.

        The new version's number is the number of finished steps. First the call waits until a
        server has confirmed the previous version. Then it starts to publish the new version, and
        starts a checkpoint if one is due. The weights are sent while the next step runs; only
        that step's optimizer waits until they have been gathered. Generation continues while
        servers load the new weights.

        A resumed run that replays steps does not publish their versions again, because the servers
        have newer ones. If a step's update was skipped because its gradient was not finite, its
        version is still published: the ledger measures staleness in versions.

        Args:
            meta: The transport to use; `WeightUpdateMeta()` is the configured one.

        Raises:
            StaleIncarnation: A newer trainer of the same run has registered.
            TransportError | WaitTimeout: The previous version could not be published, or no server
                confirmed it in time.
            InvalidInput: This model is frozen, or no batch was taken since the last call.
        """
        if self.frozen:
            raise InvalidInput("upload_weights: this model is frozen; call it on the actor")
        session = self.session
        session.check_batch()
        session.confirm_version()  # that of the step before, beside which this step was taken
        start = time.monotonic()
        version = session.step + 1
        session.status.saving(f"publishing version {version}")
        self.engine.set_version(version)
        if session.any_rank(session.rank == 0 and version > session.published_version):
            session.trace.publishing(version)
            self._publish(meta, version)
        waited, self.engine.exporter.waited_s = self.engine.exporter.waited_s, 0.0
        session.row["time/publish"] = time.monotonic() - start + waited
        self._enter_taken()
        session.finish_step()

    def checkpoint_bytes(self) -> int:
        """Returns the size of a checkpoint's tensors, summed over all ranks."""
        return self.engine.checkpoint_bytes()

    def save_checkpoint(self, directory: Path) -> Future[None]:
        """Copies the training state, then writes it in the background.

        The state is that of the model, the optimizer and the random generators. Recipes
        rarely call this method, because `upload_weights` saves checkpoints as set in the
        `checkpoint` section.

        Args:
            directory: The folder to which all ranks write their parts.

        Returns:
            A future that is done once this rank's part is written.
        """
        return self.engine.save_checkpoint(directory, background=True)

    def _enter(self, stats: dict[str, float], start: float) -> dict[str, float]:
        """Enters statistics into the step's row, under the names of metrics."""
        self.engine.taken = []
        del stats["staleness"]  # of trajectories: the batch has that of groups
        metrics = named(stats)
        if taken := self.session.noted & metrics.keys():
            raise InvalidInput(
                f"statistic {min(taken)!r}: the recipe records a number of this name: expected "
                "another name for one of them"
            )
        self.session.row.update(metrics)
        self.session.row["time/train"] = time.monotonic() - start
        return metrics

    def _enter_taken(self) -> None:
        """Enters steps that a recipe took with `engine.train_batch` into the row."""
        from areal_torch.engines.ppo import combine

        taken, self.engine.taken = self.engine.taken, []
        if taken and "train/loss" not in self.session.row:
            stats = combine(taken)
            own = {name: value for name, value in stats.items() if name not in self.session.row}
            self.session.row.update(named(own))
            self.session.row["time/train"] = stats["seconds"]

    def _publish(self, meta: WeightUpdateMeta, version: int) -> None:
        """Publishes the weights: all ranks take part in gathering; rank 0 publishes in a thread."""
        session = self.session
        source, gpu = Path(self.engine.config.path), self.engine.device.type == "cuda"
        dtype = serving_dtype(session.config.model.dtype, source, gpu=gpu)
        phase = session.trace.phase_active()
        twice = not transport_named(meta.type or session.config.weight_sync.transport).stores
        adapters = self._adapters and not twice

        def publish(tensors: tuple[HostTensor, ...], again: Again | None) -> None:
            if self._publisher is None or self._publisher[0] != meta:
                publisher = make_publisher(session.config, session.security, meta, session.offer)
                self._publisher = meta, publisher
            new = NewVersion(version, session.incarnation, tensors, source, again)
            if adapters:
                new = replace(new, adapter=self._described_by(source).info(new.name, tensors))
            with phase:
                self._publisher[1].publish(new, session.publish)

        size = sum(
            p.numel() * p.element_size()
            for name, p in self.engine.model.hf.named_parameters()
            if not adapters or ".lora_" in name
        )
        export = self.engine.export(dtype, publish, twice=twice, adapters=adapters)
        session.publishing.begin(version, export, size)

    def _described_by(self, source: Path) -> Described:
        """Reads the whole model once: its digest says what the adapters belong to."""
        from areal_torch.engines.model.lora import Described

        config = self.session.config.actor.lora
        assert config is not None, "adapters are published"
        if self._described is None:
            self._described = Described(config, build_manifest(source, 0, 0).digest)
        return self._described
