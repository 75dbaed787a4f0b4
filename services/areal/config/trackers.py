"""The experiment trackers that `tracker` names. Importing this module loads none of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal


@dataclass(frozen=True)
class KnownTracker:
    """One tracker. `areal_torch.training.tracker` adapts it; its pip extra has the same name."""

    package: str
    goes: str
    """Where its data goes, for docs/metrics.md."""


TRACKERS: dict[str, KnownTracker] = {
    "wandb": KnownTracker(
        "wandb",
        "to Weights & Biases; without a key in `WANDB_API_KEY` or `~/.netrc`, to an offline run, "
        "which `wandb sync` uploads",
    ),
    "tensorboard": KnownTracker(
        "tensorboardX", "to event files in the run folder's `tensorboard/`"
    ),
    "trackio": KnownTracker(
        "trackio",
        "to trackio's own folder (`TRACKIO_DIR`), or to the server or Space that "
        "`TRACKIO_SERVER_URL` or `TRACKIO_SPACE_ID` names; `trackio show` opens it",
    ),
    "mlflow": KnownTracker(
        "mlflow-skinny, SQLAlchemy and Alembic",
        "to the server that `MLFLOW_TRACKING_URI` names; without it, to the run folder's "
        "`mlflow.db`",
    ),
}

if TYPE_CHECKING:
    TrackerName = str
else:
    TrackerName = Literal[("none", *TRACKERS)]
