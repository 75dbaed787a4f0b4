"""The recipe's interface to the critic beside the policy.

Importing this module loads no torch: recipes name the class, and workers load recipes too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from areal.config.training import CriticConfig, PPOActorConfig
from areal.errors import InvalidInput, TrainingDiverged
from areal_torch.engines.ppo_actor import FSDPPPOActor
from areal_torch.training.session import current_session

if TYPE_CHECKING:
    from torch import Tensor

    from areal_torch.algorithms.packing import Batch

# Statistics that the metrics row has, under critic/.
_IN_ROW = ("loss", "grad_norm", "lr", "value", "return", "explained_variance", "clip_ratio")


class FSDPPPOCritic:
    """A value model, sharded over all ranks of the trainer and saved in the actor's checkpoints.

    Example:
        >>> actor, critic = FSDPPPOActor(config.actor), FSDPPPOCritic(config.critic)
        >>> batch["values"] = critic.compute_values(batch)
        >>> actor.compute_advantages(batch)
        >>> critic.ppo_update(batch)
        >>> if not critic.warming_up():
        ...     actor.ppo_update(batch)
    """

    def __init__(self, config: CriticConfig | None) -> None:
        """Loads the actor's model with a scalar head, or the newest checkpoint if the run resumes.

        Args:
            config: The experiment's `critic` section.

        Raises:
            InvalidInput: `config` is None, or there is no actor yet.
        """
        from areal_torch.engines.fsdp import FSDPEngine
        from areal_torch.engines.ppo_value import PPOCritic

        session = current_session()
        if config is None:
            raise InvalidInput("critic=null: expected algorithm=ppo, or critic={}")
        actor = session.actor
        if not isinstance(actor, FSDPPPOActor):
            raise InvalidInput(
                "FSDPPPOCritic(config.critic): expected FSDPPPOActor(config.actor) first, "
                "because the actor's checkpoints contain the critic"
            )
        ppo = actor.engine.config
        assert isinstance(ppo, PPOActorConfig)
        self.session, self.config = session, config
        self.engine = FSDPEngine(config.engine(ppo))
        self._critic = PPOCritic(self.engine, ppo.ppo_n_minibatches)
        steps = session.config.total_train_steps * ppo.ppo_n_minibatches
        session.turn.admit(self.engine)
        self.engine.initialize(total_train_steps=steps)
        actor.engine.attach("critic", self.engine)
        if session.resumed is not None:
            actor.engine.load_attached("critic", session.resumed.path)

    def warming_up(self) -> bool:
        """Returns True in the first `critic.warmup_steps` steps, which train only the critic."""
        return self.session.step < self.config.warmup_steps

    def compute_values(self, batch: Batch) -> Tensor:
        """Returns the value of the state before each loss token, float32 [T]; 0 elsewhere.

        Also adds `bootstrap_values` to the batch, float32 [S]: the value after the last token of a
        sequence that was cut off, and 0 for one that ended.
        """
        return self._critic.compute_values(batch)

    def ppo_update(self, batch: Batch) -> dict[str, float]:
        """Updates the critic on a batch, after `compute_advantages`, and returns its metrics.

        Returns:
            The critic's metrics, under their names in docs/metrics.md, such as `critic/loss` and
            `critic/explained_variance`. They are equal on all ranks, and are also written to the
            step's row in metrics.jsonl.

        Raises:
            TrainingDiverged: Several gradients in a row were not finite. The limit is 3 by default
                (`OptimizerConfig.max_skipped_steps`, which can be set only in code). The batch is
                saved in the run folder (see `areal_torch.engines.failed_step`); no weights are
                published.
        """
        try:
            stats = self._critic.ppo_update(batch)
        except TrainingDiverged as error:
            from areal_torch.engines import failed_step

            raise failed_step.keep(error, self.session, critic=self.engine.config) from None
        metrics = {f"critic/{name}": stats[name] for name in _IN_ROW}
        metrics["time/critic"] = stats["update_seconds"]
        metrics["critic/warmup"] = float(self.warming_up())
        # A step of the warm-up has no other reward.
        self.session.row.update(metrics | {"reward/mean": stats["reward"]})
        return metrics
