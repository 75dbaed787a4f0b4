"""Wires the trainer: the command line, the job, and the status server of rank 0."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from areal.chassis import tracing
from areal.chassis.bad_input import earlier_verdict, write_verdict
from areal.chassis.logging import configure_logging
from areal.chassis.service import (
    Listeners,
    Registration,
    Server,
    ServiceContext,
    check_address,
    listen_in,
)
from areal.config.experiment import GRPOConfig, load_service_config
from areal.errors import ArealError
from areal.v1.trainer_service_pb2_grpc import add_TrainerServiceServicer_to_server
from areal_torch.training.session import TrainerSession
from areal_trainer.config import TrainerConfig
from areal_trainer.job import EXIT_BAD_INPUT, FINAL, leave, run
from areal_trainer.metrics import TrainerCollector
from areal_trainer.servicer import TrainerService


class TrainerServer(Server):
    """What rank 0 serves beside training."""

    def __init__(self, service: TrainerService) -> None:
        self._service = service

    def registrations(self) -> Sequence[Registration]:
        add = partial(add_TrainerServiceServicer_to_server, self._service)
        return [("areal.v1.TrainerService", add)]


def serve_status(listen: str, metrics: str, session: TrainerSession) -> Listeners:
    """Starts gRPC and /metrics in the session's loop; serves while the result is referenced."""
    check_address(listen, "--listen", session.security)
    context = ServiceContext("trainer", listen, background=None, security=session.security)
    TrainerCollector(session.status, context.registry)
    context.waits.watch(session.waits.oldest)
    server = TrainerServer(TrainerService(session.status))
    listeners: Listeners = session.bridge.call(
        listen_in(context, server, metrics), "the status server"
    )
    return listeners


def main() -> None:
    """Runs the command line."""

    def command(
        config: Annotated[Path, typer.Option(help="The experiment file.")],
        listen: Annotated[str, typer.Option(help="host:port of TrainerService.")] = "",
        metrics: Annotated[str, typer.Option(help="host:port of /metrics and /healthz.")] = "",
        only_evaluate: Annotated[
            bool, typer.Option("--only-evaluate", help="End the recipe at its first batch.")
        ] = False,
        log_text: Annotated[
            bool, typer.Option(help="Write plain log lines instead of JSON.")
        ] = False,
    ) -> None:
        """Runs the recipe of an experiment file on this rank."""
        if line := earlier_verdict():
            print(f"areal-trainer: not started again: {line}", file=sys.stderr)  # noqa: T201
            leave(EXIT_BAD_INPUT)
        try:
            experiment: GRPOConfig = load_service_config(config)
            configure_logging("trainer", experiment.namespace, text=log_text)
            settings = TrainerConfig.from_experiment(
                experiment, config, only_evaluates=only_evaluate
            )
            serve = partial(serve_status, listen, metrics) if listen else None
            with tracing.exporting("areal-trainer", experiment.namespace):
                code = run(settings, serve)
        except ArealError as error:
            print(f"areal-trainer: {error}", file=sys.stderr)  # noqa: T201 - the one line
            code = 1
            if isinstance(error, FINAL):
                code = EXIT_BAD_INPUT
                write_verdict(str(error))  # torchrun would make a 1 of it
        leave(code)

    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(name="areal-trainer")(command)
    app(prog_name="areal-trainer")
