"""Feeds the recommendation: what this worker generates, what the trainer says of its steps.

| who | consumes      | waits for                  | unblocked by            |
|-----|---------------|----------------------------|-------------------------|
| run | GetStatus     | a new step row, at most 5 s| the trainer, its answer |

Without a trainer (it is away, or there is none) only generation counts; the log and
`areal_rollout_training_known` say so.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from areal.chassis.logging import get_logger
from areal.clients.trainer import TrainerClient
from areal.errors import ArealError
from areal_rollout.autoscaling import Load, Recommender, Sample

_EVERY_S = 5.0


class LoadWatch:
    """Watches the load; `run` never returns."""

    def __init__(
        self,
        trainer: TrainerClient | None,
        servers: Callable[[], int],
        generating_s: Callable[[], float],
        report: Callable[[int, Load, bool], None],
    ) -> None:
        """Wires it.

        Args:
            trainer: None: there is none.
            servers: Servers that take traffic now.
            generating_s: Seconds so far in which an episode was running.
            report: Told the recommendation, what it rests on, and whether the trainer answers.
        """
        self._trainer = trainer
        self._servers, self._generating_s, self._report = servers, generating_s, report
        self._log = get_logger(__name__)
        self._known, self._said = False, False
        self._recommender = Recommender()
        self._step = -1
        self._training_s = self._trained_s = 0.0

    async def run(self) -> None:
        """Samples at each interval until cancelled."""
        while True:
            began = time.monotonic()
            await self.read_rows()
            # A step a second needs no sample each.
            await asyncio.sleep(max(0.0, began + _EVERY_S - time.monotonic()))
            self.sample(time.monotonic())

    def sample(self, now: float) -> None:
        """Takes one sample of the load."""
        number = self._recommender.observe(
            Sample(now, self._servers(), self._generating_s(), self._training_s, self._trained_s)
        )
        self._report(number, self._recommender.load, self._known)

    async def read_rows(self) -> None:
        """Asks the trainer once for the steps since."""
        if self._trainer is None:
            return
        try:
            status = await self._trainer.get_status(max(0, self._step), _EVERY_S)
        except ArealError as error:
            # Starting, or restarting: the next answer has its rows.
            self._known = False
            if not self._said:
                self._log.warning("trainer_unreachable", error=str(error), counts="only generation")
                self._said = True
            return
        if self._said:
            self._log.info("trainer_reachable")
        self._known, self._said = True, False
        if self._step >= 0:  # rows of before this worker began say nothing of it
            for row in status.rows:
                seconds, waited = row.get("time/step"), row.get("time/wait", 0.0)
                if isinstance(seconds, (int, float)) and isinstance(waited, (int, float)):
                    self._trained_s += seconds
                    self._training_s += max(0.0, seconds - waited)
        self._step = status.step
