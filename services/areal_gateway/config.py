"""What the gateway shows of a run, whom it asks, what it allows and how often it looks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from areal.config.experiment import GRPOConfig
from areal.config.learning_rules import Finding, of_config
from areal.config.services import EndpointsConfig
from areal.runs.step_rows import MOST_ROWS


@dataclass(frozen=True)
class GatewayConfig:
    """Facts and endpoints of the experiment file; limits and intervals are not in it."""

    namespace: str = ""
    endpoints: EndpointsConfig = field(default_factory=EndpointsConfig)
    facts: Mapping[str, object] = field(default_factory=dict)
    """What does not change in a run, as the page shows it."""
    findings: Sequence[Finding] = ()
    """What the configuration says against learning."""
    interval_s: float = 1.0
    """Between two looks at the ledger and the servers, and between two status events."""
    trainer_wait_s: float = 10.0
    """A long poll for the trainer's next step row."""
    history: int = 900
    """Samples of queue and throughput kept for pages opened later."""
    max_rows: int = MOST_ROWS
    """Step rows kept; of more, those in the middle are thinned."""
    max_body_bytes: int = 32 * 1024 * 1024
    """A request body."""
    max_bodies_bytes: int = 128 * 1024 * 1024
    """Bodies of agents' requests that are answered at once."""
    max_streams: int = 256
    """Event streams open at once."""
    generation_s: float = 600.0
    """What one model call may take."""
    drain_s: float = 5.0
    """For running requests when the service stops."""

    @classmethod
    def from_experiment(cls, experiment: GRPOConfig) -> GatewayConfig:
        """Reads what the page shows, and where the other services are."""
        return cls(
            namespace=experiment.namespace,
            findings=of_config(experiment),
            endpoints=experiment.endpoints,
            generation_s=experiment.rollout.request_timeout_s,
            facts={
                "experiment": experiment.experiment_name,
                "trial": experiment.trial_name,
                "model": experiment.model.path,
                "total_train_steps": experiment.total_train_steps,
                "batch_size": experiment.train_dataset.batch_size,
                "n_samples": experiment.gconfig.n_samples,
                "max_head_offpolicyness": experiment.rollout.max_head_offpolicyness,
                "max_concurrent_rollouts": experiment.rollout.max_concurrent_rollouts,
            },
        )
