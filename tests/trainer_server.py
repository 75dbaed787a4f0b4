"""The trainer's status service without a trainer: `python -m tests.trainer_server HOST:PORT`."""

from __future__ import annotations

import asyncio
import sys

from areal.chassis.logging import configure_logging
from areal.chassis.service import Registration, Service, ServiceContext, start_servers
from areal.training.status import TrainerStatus
from areal.v1 import trainer_service_pb2_grpc as pb_grpc
from areal_trainer.servicer import TrainerServicer


class _Trainer(Service):
    def __init__(self) -> None:
        self.status = TrainerStatus(total_steps=10, world_size=1)

    def registrations(self) -> list[Registration]:
        servicer = TrainerServicer(self.status)
        return [
            (
                "areal.v1.TrainerService",
                lambda server: pb_grpc.add_TrainerServiceServicer_to_server(servicer, server),
            )
        ]


async def main(listen: str) -> None:
    configure_logging("trainer", "test/fuzz")
    trainer = _Trainer()
    trainer.status.finished_step(1, {"step": 1, "reward": 0.5})
    servers = await start_servers(ServiceContext("trainer", listen, None), trainer, "")
    assert servers.rpc is not None
    await servers.rpc.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
