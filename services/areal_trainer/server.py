"""One training process: arguments, ranks, the recipe, signals, the status server.

        SIGTERM ──> stop_requested ──> recipe unwinds at its next step or wait
                                            │
    main ──> session.open ──> recipe.main ──┴─> checkpoint + commit ──> exit

Exit codes: 0 the recipe finished; 2 bad input, a workflow or reward that fails, or training that
diverged: mend it, do not retry; 143 stopped by SIGTERM after a checkpoint, start again to continue;
anything else: a failure, start again to resume.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer

from areal.chassis import tracing
from areal.chassis.bad_input import earlier_verdict, write_verdict
from areal.chassis.logging import configure_logging, get_logger
from areal.chassis.service import (
    Registration,
    Servers,
    Service,
    ServiceContext,
    check_address,
    start_servers,
)
from areal.config.experiment import GRPOConfig, cautions, load_service_config
from areal.errors import ArealError, InvalidInput, TrainingDiverged, WorkflowError
from areal.recipe import Recipe, load_recipe
from areal.training.rank_watch import RankWatch
from areal.training.session import TrainerSession, TrainerStopped
from areal.v1 import trainer_service_pb2_grpc as pb_grpc
from areal_trainer.config import TrainerConfig
from areal_trainer.metrics import TrainerCollector
from areal_trainer.servicer import TrainerServicer

EXIT_BAD_INPUT = 2
"""Starting again would say the same."""
EXIT_STOPPED = 128 + signal.SIGTERM
FINAL = (InvalidInput, TrainingDiverged, WorkflowError)
"""Errors after which starting again would say the same."""


class TrainerStatusService(Service):
    """What rank 0 serves beside training."""

    def __init__(self, session: TrainerSession) -> None:
        self._servicer = TrainerServicer(session.status)

    def registrations(self) -> list[Registration]:
        return [
            (
                "areal.v1.TrainerService",
                lambda server: pb_grpc.add_TrainerServiceServicer_to_server(self._servicer, server),
            )
        ]


def _init_process_group(config: TrainerConfig) -> None:
    """Joins the ranks; nothing to do for one."""
    import datetime

    import torch
    import torch.distributed as dist

    from areal.engines.random_state import seed_all

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    seed_all(config.experiment.seed, config.rank)
    if config.world_size == 1:
        return
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(config.local_rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo",
        timeout=datetime.timedelta(seconds=config.experiment.actor.distributed_timeout_seconds),
    )


def _load(recipe_file: Path) -> ModuleType:
    module = load_recipe(Recipe.read(recipe_file).source, str(recipe_file))
    if not callable(getattr(module, "main", None)):
        raise InvalidInput(f"recipe {str(recipe_file)!r}: expected a function main(argv)")
    return module


def _serve_status(session: TrainerSession, listen: str, metrics: str) -> Servers:
    """Starts gRPC and /metrics in the session's loop; serves while the result is referenced."""
    check_address(listen, "--listen", session.security)
    context = ServiceContext("trainer", listen, background=None, security=session.security)
    TrainerCollector(session.status, context.registry)
    context.waits.watch(session.waits.oldest)
    servers: Servers = session.call(
        start_servers(context, TrainerStatusService(session), metrics), "the status server"
    )
    return servers


def run(config: TrainerConfig, listen: str, metrics: str) -> int:
    """Runs the recipe; returns the exit code."""
    log = get_logger("areal_trainer")
    module = _load(Path(config.experiment.recipe))
    _init_process_group(config)
    watch = RankWatch(config.rank, config.world_size) if config.world_size > 1 else None
    session = TrainerSession(
        config.experiment,
        rank=config.rank,
        world_size=config.world_size,
    )

    def stop(*_: Any) -> None:
        session.stop_requested = True

    signal.signal(signal.SIGTERM, stop)
    for caution in cautions(config.experiment) if config.rank == 0 else ():
        log.warning("config", caution=caution)
    servers: Servers | None = None
    try:
        if config.rank == 0 and listen:
            servers = _serve_status(session, listen, metrics)
        session.open()
        with session.active():
            module.main(["--config", str(config.config_file)])
        session.status.ended()
        return 0
    except TrainerStopped:
        return EXIT_STOPPED
    except FINAL as error:
        session.status.ended(str(error))
        raise
    except Exception as error:
        session.status.ended(f"{type(error).__name__}: {error}")
        log.error("trainer_failed", step=session.step, exc_info=error)
        if watch is not None and (dead := watch.gone()):
            log.error("rank_lost", cause=f"{dead} died")
        return 1
    finally:
        if servers is not None:
            session.call(servers.stop(0.5), "stopping the status server", timeout=5)
        session.close()
        if watch is not None:
            watch.stop()


def _leave(code: int) -> None:
    """Ends this rank; a failed one at once, for the others wait for it in collectives."""
    sys.stdout.flush()
    sys.stderr.flush()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        if code not in (0, EXIT_STOPPED):
            os._exit(code)
        import torch.distributed as dist

        dist.destroy_process_group()
    raise typer.Exit(code)


def main() -> None:
    """The command line."""

    def command(
        config: Annotated[Path, typer.Option(help="The experiment file.")],
        listen: Annotated[str, typer.Option(help="host:port of TrainerService.")] = "",
        metrics: Annotated[str, typer.Option(help="host:port of /metrics and /healthz.")] = "",
        log_text: Annotated[bool, typer.Option(help="Plain log lines instead of JSON.")] = False,
    ) -> None:
        """Runs the recipe of an experiment file on this rank."""
        if line := earlier_verdict():
            print(f"areal-trainer: not started again: {line}", file=sys.stderr)  # noqa: T201
            _leave(EXIT_BAD_INPUT)
        try:
            experiment: GRPOConfig = load_service_config(config)
            configure_logging("trainer", experiment.namespace, text=log_text)
            settings = TrainerConfig.from_experiment(experiment, config)
            with tracing.exporting("areal-trainer", experiment.namespace):
                code = run(settings, listen, metrics)
        except ArealError as error:
            print(f"areal-trainer: {error}", file=sys.stderr)  # noqa: T201 - the one line
            code = 1
            if isinstance(error, FINAL):
                code = EXIT_BAD_INPUT
                write_verdict(str(error))  # torchrun would make a 1 of it
        _leave(code)

    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(name="areal-trainer")(command)
    app(prog_name="areal-trainer")
