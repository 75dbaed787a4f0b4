"""Sends the metrics of each step to the experiment tracker that `tracker` names (rank 0).

| consumes | waits for | unblocked by |
|---|---|---|
| memory of at most BACKLOG rows, a thread | the tracker | its answer; CLOSE_S at the end |

A tracker never stops a run. Rows that it refuses, or that it is too slow for, are left out, and the
log says so once. metrics.jsonl has all rows.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from areal.chassis.logging import get_logger
from areal.config.experiment import BaseExperimentConfig
from areal.errors import InvalidInput

BACKLOG = 256
CLOSE_S = 60.0


class Tracker(Protocol):
    """The interface of a tracker; called by one thread."""

    def log(self, step: int, row: Mapping[str, float]) -> None:
        """Keeps the numbers of a step."""

    def close(self) -> None:
        """Sends what is left."""


class Wandb:
    """Weights & Biases: one run per trial, continued when it resumes.

    Without a key in the environment or ~/.netrc it is an offline run: `wandb sync` uploads it.
    """

    def __init__(self, config: BaseExperimentConfig, step: int) -> None:
        """Raises ImportError without the package."""
        import wandb

        known = os.environ.get("WANDB_API_KEY") or wandb.api.api_key
        name = f"{config.experiment_name}-{config.trial_name}"
        self._run = wandb.init(
            project=config.experiment_name,
            name=config.trial_name,
            id=re.sub(r"[^A-Za-z0-9_-]", "-", name),
            resume="allow",
            dir=str(config.run_dir),
            config=settings_of(config),
            mode=os.environ.get("WANDB_MODE") or ("online" if known else "offline"),
        )

    def log(self, step: int, row: Mapping[str, float]) -> None:
        """See `Tracker`."""
        self._run.log(dict(row), step=step)

    def close(self) -> None:
        """See `Tracker`."""
        self._run.finish()


class TensorBoard:
    """Event files in the run folder's `tensorboard/`: one for each start of the trainer.

    TensorBoard hides what earlier files have of the steps that a resumed run takes again.
    """

    def __init__(self, config: BaseExperimentConfig, step: int) -> None:
        """Raises ImportError without tensorboardX."""
        from tensorboardX import SummaryWriter

        folder = str(config.run_dir / "tensorboard")
        self._writer = SummaryWriter(folder, purge_step=step + 1 if step else None)

    def log(self, step: int, row: Mapping[str, float]) -> None:
        """See `Tracker`."""
        for name, value in row.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """See `Tracker`."""
        self._writer.close()


class Trackio:
    """Trackio: one run per trial, continued when it resumes.

    Its data is where trackio keeps it (TRACKIO_DIR), or on the server or Space that
    TRACKIO_SERVER_URL or TRACKIO_SPACE_ID names; `trackio show` opens it.
    """

    def __init__(self, config: BaseExperimentConfig, step: int) -> None:
        """Raises ImportError without the package."""
        import trackio

        self._run = trackio.init(
            project=config.experiment_name,
            name=config.trial_name,
            config=settings_of(config),
            resume="allow",
            embed=False,
        )

    def log(self, step: int, row: Mapping[str, float]) -> None:
        """See `Tracker`."""
        # These two are columns of trackio's own.
        self._run.log({k: v for k, v in row.items() if k not in ("step", "time")}, step=step)

    def close(self) -> None:
        """See `Tracker`."""
        self._run.finish()


class Mlflow:
    """MLflow: one run per trial, continued when it resumes.

    Without MLFLOW_TRACKING_URI its database is `mlflow.db` in the run folder.
    """

    def __init__(self, config: BaseExperimentConfig, step: int) -> None:
        """Raises ImportError without the package."""
        from mlflow import MlflowClient, entities

        address = os.environ.get("MLFLOW_TRACKING_URI")
        self._entities = entities
        self._client = MlflowClient(address or f"sqlite:///{config.run_dir.resolve()}/mlflow.db")
        name = config.experiment_name
        experiment = self._client.get_experiment_by_name(name)
        if experiment is not None:
            where = experiment.experiment_id
        elif address:
            where = self._client.create_experiment(name)
        else:
            where = self._client.create_experiment(name, str(config.run_dir.resolve() / "mlruns"))
        named = f"attributes.run_name = '{config.trial_name}'"  # letters, digits, dashes
        known = self._client.search_runs([where], named, max_results=1)
        run = known[0] if known else self._client.create_run(where, run_name=config.trial_name)
        self._run_id = run.info.run_id
        if known:
            self._client.update_run(self._run_id, status="RUNNING")
        else:
            # Only at a run's first start: MLflow's parameters cannot change.
            settings = [
                entities.Param(key, str(value)) for key, value in _flat(settings_of(config)).items()
            ]
            for begin in range(0, len(settings), _MLFLOW_PARAMS):
                part = settings[begin : begin + _MLFLOW_PARAMS]
                self._client.log_batch(self._run_id, params=part)

    def log(self, step: int, row: Mapping[str, float]) -> None:
        """See `Tracker`."""
        at = round(time.time() * 1000)
        metrics = [self._entities.Metric(name, value, at, step) for name, value in row.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def close(self) -> None:
        """See `Tracker`."""
        self._client.set_terminated(self._run_id)


# One for each of areal.config.trackers.TRACKERS.
_KINDS: dict[str, Callable[[BaseExperimentConfig, int], Tracker]] = {
    "wandb": Wandb,
    "tensorboard": TensorBoard,
    "trackio": Trackio,
    "mlflow": Mlflow,
}
_MLFLOW_PARAMS = 100  # the most that MLflow takes in one request


def settings_of(config: BaseExperimentConfig) -> dict[str, Any]:
    """Returns the experiment file as plain values, without sections about where things run."""
    plain = asdict(config)
    for section in ("endpoints", "security", "stack"):
        plain.pop(section, None)
    return {key: str(value) if isinstance(value, Path) else value for key, value in plain.items()}


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns {"actor.optimizer.lr": 1e-5, …}."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value
    return found


class StepTracker:
    """Rows on their way to a tracker."""

    def __init__(self, config: BaseExperimentConfig, step: int = 0) -> None:
        """Starts the tracker that the experiment names; without one, rows are dropped.

        Args:
            config: The experiment.
            step: Finished steps of the run that continues.

        Raises:
            InvalidInput: Its package is not installed.
        """
        self._tracker: Tracker | None = None
        self._name = config.tracker
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="areal-tracker")
        self._room = threading.Semaphore(BACKLOG)
        self._complained = False
        self._log = get_logger(__name__)
        if config.tracker == "none":
            return
        try:
            self._tracker = _KINDS[config.tracker](config, step)
        except ImportError:
            raise InvalidInput(
                f"tracker {config.tracker!r}: its package is not installed where the trainer "
                f"runs; pip install 'areal-services[{config.tracker}]'"
            ) from None
        except Exception as error:
            self._complain(f"does not start: {type(error).__name__}: {error}")

    def log(self, step: int, row: Mapping[str, Any]) -> None:
        """Hands the numbers of a row to the thread; never waits."""
        tracker = self._tracker
        if tracker is None:
            return
        numbers = {
            name: float(value) for name, value in row.items() if isinstance(value, int | float)
        }
        if not self._room.acquire(blocking=False):
            self._complain(f"is more than {BACKLOG} rows behind: some are left out")
            return

        def send() -> None:
            try:
                tracker.log(step, numbers)
            except Exception as error:
                self._complain(f"refused step {step}: {type(error).__name__}: {error}")
            finally:
                self._room.release()

        self._thread.submit(send)

    def close(self) -> None:
        """Waits at most CLOSE_S for what is on its way."""
        if self._tracker is not None:
            ended = self._thread.submit(self._tracker.close)
            wait([ended], CLOSE_S)
            if not ended.done():
                self._complain(f"has not taken the last rows within {CLOSE_S:.0f} s")
            elif error := ended.exception():
                self._complain(f"did not close: {error}")
            self._tracker = None
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _complain(self, what: str) -> None:
        if not self._complained:
            self._log.warning("tracker_failed", tracker=self._name, cause=what)
        self._complained = True
