"""One rank's part in a training job: the other ranks, the recipe, signals, exit codes.

        SIGTERM ──> stop_requested ──> recipe unwinds at its next step or wait
                                            │
    run ──> session.open ──> recipe.main ───┴─> checkpoint + commit ──> exit

Exit codes: 0 the recipe finished; 2 bad input, a recipe, workflow or reward that fails, or training
that diverged: mend it, do not retry; 143 stopped by SIGTERM after a checkpoint, start again to
continue; anything else: a failure, start again to resume.
"""

from __future__ import annotations

import ctypes
import inspect
import os
import signal
import sys
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from types import ModuleType
from typing import Any

import typer

from areal.chassis.collector import collector_paused
from areal.chassis.logging import get_logger
from areal.chassis.service import Listeners
from areal.config.experiment import GRPOConfig, cautions
from areal.errors import CannotStart, InvalidInput, TrainingDiverged, WorkflowError
from areal.recipe import Recipe, load_recipe
from areal_torch.training.offline_session import OfflineSession
from areal_torch.training.rank_watch import RankWatch
from areal_torch.training.session import EvaluationEnded, TrainerSession, TrainerStopped
from areal_torch.training.stall_watch import LEAST_S, STEPS, StallWatch
from areal_trainer.config import TrainerConfig
from areal_trainer.recipe_fault import fault_of_recipe

EXIT_BAD_INPUT = 2
"""Exit code of a failure that a restart would only repeat."""
EXIT_STOPPED = 128 + signal.SIGTERM
FINAL = (CannotStart, InvalidInput, TrainingDiverged, WorkflowError)
"""Errors that a restart would only repeat."""
_ARENA_MAX, _ARENAS = -8, 2  # an option of malloc.h, and its value


def grow_segments(environment: MutableMapping[str, str]) -> None:
    """Lets torch's GPU allocator grow its segments, unless the user has configured it.

    Packed micro-batches differ in size, which otherwise leaves memory in pieces that fit none.
    torch reads the variable when it first allocates.
    """
    if "PYTORCH_ALLOC_CONF" not in environment:  # the newer name
        environment.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")


def share_arenas(environment: Mapping[str, str]) -> None:
    """Lets all threads share two arenas of the C library, unless the user has set their number.

    By default there are up to eight for each core, and each keeps what its threads have once
    needed, so that a long run grows.
    """
    chosen = "arena_max" in environment.get("GLIBC_TUNABLES", "")
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # None: another C library
    if mallopt is not None and not chosen and "MALLOC_ARENA_MAX" not in environment:
        mallopt(_ARENA_MAX, _ARENAS)


def _prepare_allocators() -> None:
    grow_segments(os.environ)
    share_arenas(os.environ)


def threads_of_rank(experiment: GRPOConfig, environment: Mapping[str, str], cores: int) -> int:
    """Returns the number of threads that a rank computes with on the CPU.

    One, because processes share the cores; but with `actor.offload` the optimizer runs there, so
    the ranks of a node share all cores.

    Args:
        experiment: Says whether the optimizer does.
        environment: From the launcher (OMP_NUM_THREADS) and torchrun (LOCAL_WORLD_SIZE).
        cores: Those that this process may use.
    """
    if experiment.actor.offload:
        return max(1, cores // int(environment.get("LOCAL_WORLD_SIZE", "1")))
    return int(environment.get("OMP_NUM_THREADS", "1"))


def _init_process_group(config: TrainerConfig) -> None:
    """Joins the ranks; for one there is only its device to check.

    Raises:
        ConfigError: A GPU was asked for, and torch cannot use it.
    """
    import datetime

    import torch
    import torch.distributed as dist

    from areal_torch.engines.parallel.mesh import local_device
    from areal_torch.engines.random_state import seed_all

    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(threads_of_rank(config.experiment, os.environ, cores))
    device = local_device(gpu=config.experiment.stack.gpus_per_node > 0)
    seed_all(config.experiment.seed, config.rank)
    if config.world_size == 1:
        return
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo",
        timeout=datetime.timedelta(seconds=config.experiment.actor.distributed_timeout_seconds),
    )


def _load(recipe_file: Path) -> ModuleType:
    with collector_paused():  # it imports torch
        module = load_recipe(Recipe.read(recipe_file).source, str(recipe_file))
    if not callable(getattr(module, "main", None)):
        raise InvalidInput(f"recipe {str(recipe_file)!r}: expected a function main(argv)")
    return module


def _call(main: Callable[[list[str]], object], config_file: Path) -> object:
    """Returns what `main` returns; leaving it with `sys.exit()` counts as returning."""
    try:
        return main(["--config", str(config_file)])
    except EvaluationEnded:
        return None
    except SystemExit as error:
        if error.code:
            raise InvalidInput(f"main ended with SystemExit: {error.code}") from None
        return None


def _place(main: Callable[..., object], recipe: str) -> str:
    code = getattr(inspect.unwrap(main), "__code__", None)
    return recipe if code is None else f"{code.co_filename}:{code.co_firstlineno}"


def _watch_stalls(config: TrainerConfig, session: TrainerSession) -> StallWatch:
    # A collective has a deadline of its own.
    least = max(LEAST_S, 1.2 * config.experiment.actor.distributed_timeout_seconds)
    watch = StallWatch(lambda: max(least, STEPS * session.status.longest_step_s))
    session.waits.watch(watch.waits)
    return watch


def run(config: TrainerConfig, serve: Callable[[TrainerSession], Listeners] | None) -> int:
    """Runs the recipe; returns the exit code.

    Args:
        config: The experiment, and this rank's place in the world.
        serve: Starts the status server of rank 0; None: no one asked for it.
    """
    log = get_logger(__name__)
    _prepare_allocators()  # before the recipe imports torch and there are threads
    recipe = Path(config.experiment.recipe)
    module = _load(recipe)
    try:
        _init_process_group(config)
    except ImportError as error:
        log.error("trainer_failed", exc_info=error)
        raise CannotStart(f"{error}; pip install 'areal-services[trainer]'") from error
    watch = RankWatch(config.rank, config.world_size) if config.world_size > 1 else None
    kind = OfflineSession if config.experiment.offline else TrainerSession
    session = kind(
        config.experiment,
        rank=config.rank,
        world_size=config.world_size,
    )
    session.only_evaluates = config.only_evaluates

    stall = _watch_stalls(config, session)

    def stop(*_: Any) -> None:
        session.stop_requested = True

    signal.signal(signal.SIGTERM, stop)
    for caution in cautions(config.experiment) if config.rank == 0 else ():
        log.warning("config", caution=caution)
    listeners: Listeners | None = None
    try:
        if config.rank == 0 and serve is not None:
            listeners = serve(session)
        session.open()
        with session.active():
            main = module.main
            ended = _call(main, config.config_file)
            session.check_complete(_place(main, config.experiment.recipe), ended)
        session.status.ended()
        return 0
    except TrainerStopped:
        return EXIT_STOPPED
    except FINAL as error:
        session.status.ended(str(error))
        raise
    except Exception as error:
        line = fault_of_recipe(error, recipe)
        session.status.ended(line or f"{type(error).__name__}: {error}")
        log.error("trainer_failed", step=session.step, exc_info=error)
        if watch is not None and (dead := watch.gone()):
            log.error("rank_lost", cause=f"{dead} died")
        elif line:
            raise WorkflowError(line) from error
        return 1
    finally:
        stall.stop()  # what follows has deadlines
        if listeners is not None:
            session.bridge.call(listeners.stop(0.5), "stopping the status server", timeout=5)
        session.close()
        if watch is not None:
            watch.stop()


def leave(code: int) -> None:
    """Ends this rank; a failed one at once, for the others wait for it in collectives."""
    sys.stdout.flush()
    sys.stderr.flush()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        if code not in (0, EXIT_STOPPED):
            os._exit(code)
        import torch.distributed as dist

        dist.destroy_process_group()
    raise typer.Exit(code)
