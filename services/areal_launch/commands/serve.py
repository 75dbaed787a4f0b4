"""`areal serve MODEL`: starts only inference servers, for people and programs that query a model.

find the model ──> fetch it, if it is elsewhere ──> start servers ──> print URLs ──┐
                                                     Ctrl-C, SIGTERM, a failure ───┤
                                                                                   v
                                                                                 stop
"""

from __future__ import annotations

import asyncio
import os
import re
import signal

from areal.chassis.logging import configure_logging
from areal.config.allocation import of_ranks
from areal.config.experiment import BaseExperimentConfig
from areal.errors import ConfigError
from areal_launch.clusters.base import Cluster, Placement
from areal_launch.commands.stack import Resolved, resolve_up
from areal_launch.doctor.gpus import refuse_unusable
from areal_launch.gpus.engine import uses_cpu_engine
from areal_launch.gpus.visible import lent
from areal_launch.processes.process import Node
from areal_launch.run_folder import RunFolder
from areal_launch.stack.events import EventLog, StackEvent
from areal_launch.stack.local import LocalStack
from areal_launch.view.output import say


def serve_model(model: str, overrides: list[str], *, servers: int, port: int, gpus: int) -> int:
    """Serves the model until Ctrl-C; returns the exit code.

    Args:
        model: A folder, a model's name on the Hub, or an address in an object store.
        overrides: `KEY=VALUE` settings; `model.context_length` and `stack.*` matter here.
        servers: Number of servers.
        port: Port of the first server. Each other server takes the next port, or any free one.
        gpus: GPUs of each server; 0 runs the CPU engine.

    Raises:
        CannotStart: The model does not exist, SGLang is not installed, there are too few GPUs, or
            the run folder is in use.
    """
    name = re.sub(r"[^A-Za-z0-9.-]+", "-", model).strip("-.")[-60:] or "model"
    settings = [
        f"model.path={model}",
        "experiment_name=serve",
        f"trial_name={name}",
        f"allocation_mode={of_ranks(1, servers, max(gpus, 1))}",
        f"stack.gpus_per_node={servers * gpus}",
    ]
    resolved = resolve_up(None, None, [*settings, *overrides])
    if gpus and uses_cpu_engine(resolved.config):
        raise ConfigError(
            f"--gpus {gpus}: expected 0 with stack.inference_command=cpu, whose servers take none"
        )
    refuse_unusable(resolved.config, with_trainer=False, servers_only=True)
    return asyncio.run(_serve(resolved, port, _Servers(servers, gpus)))


class _Servers(Cluster):
    """This machine. The servers get the first GPUs, because there is no trainer."""

    def __init__(self, servers: int, gpus: int) -> None:
        names = lent(os.environ, servers * gpus)
        self._nodes = tuple(
            Node(gpus=names[index * gpus : (index + 1) * gpus]) for index in range(servers)
        )

    async def open(self, config: BaseExperimentConfig) -> Placement:
        """See `Cluster`."""
        return Placement(inference=self._nodes)


async def _serve(resolved: Resolved, port: int, cluster: Cluster) -> int:
    folder = RunFolder(resolved.config.run_dir)
    folder.make()
    log = folder.log_of("launcher").open("a", 1, "utf-8")
    configure_logging("launcher", resolved.config.namespace, stream=log)
    events = EventLog()
    events.listen(_tell)
    stack = LocalStack(
        resolved.config, events, with_trainer=False, cluster=cluster, first_port=port
    )
    interrupt = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, interrupt.set)
    await stack.open()
    failed = True
    try:
        working = asyncio.create_task(_work(stack, resolved))
        interrupted = asyncio.create_task(interrupt.wait())
        await asyncio.wait({working, interrupted}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
        failed = False
    finally:
        for task in (working, interrupted):
            task.cancel()
        await asyncio.gather(working, interrupted, return_exceptions=True)
        say("stopping")
        await stack.stop(failed=failed)
        log.close()
    return 0


async def _work(stack: LocalStack, resolved: Resolved) -> None:
    """Starts the servers, prints their addresses, and waits for them to end.

    Raises StackFailure when a server cannot be kept alive.
    """
    say(f"starting {resolved.config.model.path}; logs are in {stack.folder.logs}")
    await stack.start(prepare=resolved.prepare, source=resolved.source)
    for spec in stack.plan.inference:
        say(f"serving {spec.url}/v1  (OpenAI and Anthropic; SGLang's protocol at {spec.url})")

    say(f"API key: areal token --run {stack.folder.path}")
    say("Ctrl-C stops everything")
    await stack.wait()


def _tell(event: StackEvent) -> None:
    progress = event.level == "info" and event.process.startswith("inference-")
    if progress or event.level in ("warning", "error"):
        say(f"{event.process}: {event.text}")
