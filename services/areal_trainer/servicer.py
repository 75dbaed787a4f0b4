"""TrainerService: converts between the RPC and the session's status."""

from __future__ import annotations

from typing import Any

import grpc
import orjson

from areal.runs.status import TrainerStatus
from areal.v1 import trainer_service_pb2 as pb
from areal.v1 import trainer_service_pb2_grpc as pb_grpc

# A long poll is bounded by the server too: a client that is gone must not be waited for.
MAX_WAIT_S = 30.0
# A client that is far behind reads in pages: a row is about 4 kB.
MAX_ROWS = 500


class TrainerService(pb_grpc.TrainerServiceServicer):
    """Answers from memory; never blocks training."""

    def __init__(self, status: TrainerStatus) -> None:
        self._status = status

    async def GetStatus(  # noqa: N802 - the RPC's name
        self,
        request: pb.GetStatusRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> pb.GetStatusResponse:
        """Status and rows; see the proto."""
        wait = min(max(request.max_wait.ToMilliseconds() / 1000, 0.0), MAX_WAIT_S)
        snapshot = await self._status.wait_for_row(request.after_step, wait)
        return pb.GetStatusResponse(
            state=snapshot.state,
            step=snapshot.step,
            total_steps=snapshot.total_steps,
            incarnation=snapshot.incarnation,
            world_size=snapshot.world_size,
            detail=snapshot.detail,
            rows=[
                pb.StepRow(step=row["step"], metrics_json=orjson.dumps(row).decode())
                for row in snapshot.rows[:MAX_ROWS]
            ],
            evaluations=[
                pb.Evaluation(
                    name=e.name,
                    step=e.step,
                    mean_reward=e.mean_reward,
                    rows=e.rows,
                    failed=e.failed,
                )
                for e in snapshot.evaluations
            ],
        )
