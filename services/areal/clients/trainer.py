"""Client of TrainerService, which reports a running trainer's status."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

from areal.clients.base import CallPolicy, Client, Policies, to_duration
from areal.protocol.trajectories import parse_json_object
from areal.v1 import trainer_service_pb2 as pb
from areal.v1 import trainer_service_pb2_grpc as pb_grpc


@dataclass(frozen=True)
class TrainerStatus:
    """The status that a trainer reports.

    Example:
        >>> status.state, status.step, status.total_steps, status.rows[-1]["reward/mean"]
        ('training', 41, 220, 0.63)
    """

    state: str
    """starting, waiting, training, saving, finished, failed or unspecified."""
    step: int
    """Finished steps."""
    total_steps: int
    incarnation: int
    world_size: int
    detail: str
    """What it waits for now, or why it failed."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    """Rows of metrics.jsonl after the step asked for, oldest first; each has `step`."""
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    """{"name", "step", "mean_reward"} of each time that held-out rows were measured; also "rows" in
    the mean and "failed" rows, if they are known."""


class TrainerClient(Client):
    """Watches a trainer's status."""

    POLICIES: ClassVar[Policies] = {"GetStatus": CallPolicy(5.0)}

    @cached_property
    def _stub(self) -> pb_grpc.TrainerServiceAsyncStub:
        return pb_grpc.TrainerServiceStub(self._channel)

    async def get_status(self, after_step: int = 0, max_wait_s: float = 0.0) -> TrainerStatus:
        """Status, and the step rows after `after_step`.

        Args:
            after_step: Rows up to and including this step are left out.
            max_wait_s: Long poll: wait up to this many seconds for a new row.

        Raises:
            Unavailable: No trainer answers at the address.
            WaitTimeout: It accepted the call and did not answer in time.
        """
        request = pb.GetStatusRequest(after_step=after_step, max_wait=to_duration(max_wait_s))
        reply = await self.call(self._stub.GetStatus, request, wait_s=max_wait_s)
        rows = []
        for row in reply.rows:
            metrics = parse_json_object(row.metrics_json, f"trainer row {row.step} metrics_json")
            rows.append({**metrics, "step": row.step})
        return TrainerStatus(
            state=pb.TrainerState.Name(reply.state).removeprefix("TRAINER_STATE_").lower(),
            step=reply.step,
            total_steps=reply.total_steps,
            incarnation=reply.incarnation,
            world_size=reply.world_size,
            detail=reply.detail,
            rows=rows,
            evaluations=[
                {"name": e.name, "step": e.step, "mean_reward": e.mean_reward}
                | ({"rows": e.rows, "failed": e.failed} if e.rows else {})
                for e in reply.evaluations
            ],
        )
