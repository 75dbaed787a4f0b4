"""The trainer's status service without a trainer: `python -m tests.trainer_server HOST:PORT`."""

from __future__ import annotations

import asyncio
import sys

from areal.chassis.logging import configure_logging
from areal.chassis.service import ServiceContext, listen_in
from areal.runs.status import TrainerStatus
from areal_trainer.server import TrainerServer
from areal_trainer.servicer import TrainerService


async def main(listen: str) -> None:
    configure_logging("trainer", "test/fuzz")
    status = TrainerStatus(total_steps=10, world_size=1)
    status.finished_step(1, {"step": 1, "reward": 0.5})
    server = TrainerServer(TrainerService(status))
    listeners = await listen_in(ServiceContext("trainer", listen, None), server, "")
    assert listeners.rpc is not None
    await listeners.rpc.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
