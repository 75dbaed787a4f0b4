"""`areal run` and `areal up`: resolve, start, show, stop, sum up.

    resolve (nothing started) ──> open ──> start ──> ready ──> wait ──┐
                                   │ Ctrl-C, SIGTERM, failure ────────┤
                                   v                                  v
                                  last look ──> stop ──> summary.json, reward.png, last screen

| state   | consumes     | waits for                     | unblocked by                        |
|---------|--------------|-------------------------------|-------------------------------------|
| running | the terminal | the work or a signal          | trainer's end, failure, signal      |
| stopping| grace time   | LocalStack.stop               | processes end, or a second signal   |
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from areal.chassis import endless
from areal.chassis.logging import configure_logging, get_logger
from areal.config.experiment import (
    BaseExperimentConfig,
    GRPOConfig,
    as_yaml,
    build_config,
    cautions,
    keys_with_secrets,
)
from areal.config.learning_rules import of_config
from areal.config.model_origin import find_model
from areal.errors import ArealError, CannotStart, ConfigError, InvalidInput
from areal.recipe import Recipe, find_config_class, load_recipe
from areal.security import Security, redact
from areal.types import TaskState
from areal_launch.clusters.base import Cluster
from areal_launch.commands.dead_letters import keep_dead_letters
from areal_launch.doctor.gpus import unused_gpus
from areal_launch.doctor.preflight import check_start
from areal_launch.processes.descendants import end_tagged
from areal_launch.processes.process import ProcessSpec, last_lines, python_environment
from areal_launch.processes.usage import UsageSampler
from areal_launch.run_folder import RunFolder, write_json
from areal_launch.stack.events import EventLog
from areal_launch.stack.local import PREPARE_TIMEOUT_S, LocalStack
from areal_launch.stack.plan import missing_model
from areal_launch.stack.returned_episodes import ReturnedEpisodes
from areal_launch.stack.trial_config import check_unchanged
from areal_launch.view.display import Display, choose_display
from areal_launch.view.output import warn
from areal_launch.view.poller import LAST_LOOK_S, Snapshot, StackPoller
from areal_launch.view.rows import read_rows
from areal_launch.view.summary import build_summary, continue_summary, read_results

_PLOT_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Resolved:
    """A checked experiment, before anything is started."""

    config: BaseExperimentConfig
    prepare: bool
    """Whether the recipe creates the model, or it is fetched, before anything else starts."""
    source: str = ""
    """Where the model is fetched from; "": it is not fetched."""

    @property
    def model_later(self) -> str:
        """Says what provides the model when a run begins; "": it is there."""
        if self.source:
            return f"downloaded from {self.source}"
        return "prepare_model creates it" if self.prepare else ""


def resolve_run(
    recipe: Path, config: Path | None, overrides: list[str], *, with_trainer: bool = True
) -> Resolved:
    """Loads the recipe and the experiment file.

    Raises:
        InvalidInput: One line: a missing file, a syntax error with its line, an unknown key.
        CannotStart: The model, or something else that a run needs, does not exist.
    """
    resolved, module = read_experiment(recipe, config, overrides)
    can_prepare = callable(getattr(module, "prepare_model", None))
    return with_model(resolved, can_prepare=can_prepare, with_trainer=with_trainer)


def print_config(recipe: Path, config: Path | None, overrides: list[str]) -> int:
    """Prints the resolved experiment file without its secrets; does not look for the model."""
    resolved, _ = read_experiment(recipe, config, overrides)
    sys.stdout.write(redact(as_yaml(resolved)))
    for key in keys_with_secrets(resolved):
        warn(f"{key}: its secret is printed as ***; write it into a file of security.dir instead")
    return 0


def read_experiment(
    recipe: Path, config: Path | None, overrides: list[str]
) -> tuple[BaseExperimentConfig, ModuleType]:
    """Returns the resolved experiment and its recipe's module; does not look for the model."""
    source = Recipe.read(recipe)
    module = load_recipe(source.source, str(recipe))
    if not callable(getattr(module, "main", None)):
        raise InvalidInput(f"recipe {str(recipe)!r}: expected a function main(argv)")
    file, beside = config, recipe.with_suffix(".yaml")
    if recipe.is_dir():
        beside = recipe / "recipe.yaml"
    if file is None and beside.is_file():
        file = beside
    resolved = build_config(find_config_class(module, GRPOConfig), file, overrides)
    resolved.recipe = str(recipe.resolve())
    if file is None and not (resolved.model.path or resolved.endpoints.inference):
        raise ConfigError(
            f"experiment file {str(beside)!r}: does not exist and --config is not given, "
            "so model.path is empty; create the file, or give --config FILE or model.path=DIRECTORY"
        )
    return resolved, module


def resolve_up(recipe: Path | None, config: Path | None, overrides: list[str]) -> Resolved:
    """Resolves the configuration of a stack without a trainer, where a recipe is optional."""
    if recipe is not None:
        return resolve_run(recipe, config, overrides, with_trainer=False)
    resolved = build_config(GRPOConfig, config, overrides)
    return with_model(resolved, can_prepare=False, with_trainer=False)


def with_model(
    config: BaseExperimentConfig, *, can_prepare: bool, with_trainer: bool = True
) -> Resolved:
    """Looks for the configured model; `can_prepare`: whether the recipe can make it.

    Raises:
        CannotStart: The model, or something else that a run needs, does not exist.
    """
    folder, source = find_model(config.model.path, made=can_prepare)
    if source:
        config.model.path = str(folder)
        check_start(config, will_prepare=True, with_trainer=with_trainer)
        return Resolved(config, prepare=True, source=source)
    why = "" if config.endpoints.inference else missing_model(config)
    if why and not (can_prepare and config.model.path):
        # An empty model.path is bad input; a path that does not exist may exist later.
        raise (CannotStart if config.model.path else ConfigError)(why)
    check_start(config, will_prepare=bool(why), with_trainer=with_trainer)
    return Resolved(config, prepare=bool(why))


def run_foreground(
    resolved: Resolved,
    *,
    with_trainer: bool,
    as_json: bool = False,
    ready_fd: int | None = None,
    cluster: Cluster | None = None,
    accept_changes: bool = False,
    only_evaluate: bool = False,
) -> int:
    """Runs a stack from this process until it ends; returns the exit code.

    `cluster`: lends the nodes; None: this machine. `accept_changes`: whether the
    configuration of a trial that has already trained may change. `only_evaluate`: whether the
    recipe ends when it asks for its first batch.
    """
    folder = RunFolder(resolved.config.run_dir)
    changes = check_unchanged(resolved.config, accept=accept_changes)
    _make_folder(resolved.config)
    # Open until this process ends: libraries may log until then.
    log = folder.log_of("launcher").open("a", 1, "utf-8")
    configure_logging("launcher", resolved.config.namespace, stream=log)
    if changes:
        get_logger(__name__).warning("configuration_changed", changes=changes)
    display = choose_display(as_json=as_json, quiet=ready_fd is not None)
    stack = LocalStack(
        resolved.config,
        EventLog(),
        with_trainer=with_trainer,
        only_evaluate=only_evaluate,
        cluster=cluster,
    )
    return asyncio.run(Session(resolved, stack, display, ready_fd=ready_fd).run())


def _make_folder(config: BaseExperimentConfig) -> None:
    """Creates the run folder; raises CannotStart for what `preflight` cannot see (a quota)."""
    folder = RunFolder(config.run_dir)
    try:
        folder.make(shared=bool(config.endpoints.inference))
    except OSError as error:
        raise CannotStart(
            f"run folder {str(folder.logs)!r}: {error.strerror}; choose another with run_root=DIR"
        ) from None


class Session:
    """One invocation of `areal run` or `areal up`."""

    def __init__(
        self, resolved: Resolved, stack: LocalStack, display: Display, *, ready_fd: int | None
    ) -> None:
        """`ready_fd`: a pipe that receives "ready", or the reason why the stack is not."""
        self._resolved = resolved
        self._stack = stack
        self._display = display
        self._ready_fd = ready_fd

    async def run(self) -> int:
        began, stack, with_trainer = time.monotonic(), self._stack, self._stack.with_trainer
        interrupt = asyncio.Event()
        self._handle_signals(interrupt)
        usage = UsageSampler(stack.pids)
        await stack.open()
        stack.folder.dead_letters_file.unlink(missing_ok=True)
        poller = StackPoller(
            stack.config.endpoints, Security.load(stack.config.security), with_trainer=with_trainer
        )

        def ended(error: BaseException) -> None:
            stack.events.report("error", "launcher", f"{type(error).__name__}: {error}")

        background = [endless.keep(usage.run(), "usage", ended)]
        status, error = "failed", None
        try:
            poller.listen_notices(partial(stack.events.report, "warning", "recipe"))
            poller.listen_servers(self._tell_of_servers)
            poller.start()
            self._display.begin(stack, poller, usage)
            for caution in cautions(stack.config) if with_trainer else ():
                stack.events.report("warning", "config", caution)
            if unused := unused_gpus(stack.config):
                stack.events.report("warning", "gpus", unused)
            background.append(endless.keep(self._display.run(), "display", ended))
            background.append(endless.keep(self._returned().run(), "returned episodes", ended))
            status, error = await self._work(interrupt)
            stack.cause = str(error or "")
            if stack.supervisor.processes:
                await poller.refresh(timeout=LAST_LOOK_S)
                await self._keep_dead_letters(poller.snapshot)
        finally:
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)
            await poller.close()
            self._display.end("stopping")
            await stack.stop(failed=status == "failed")
        if isinstance(error, (CannotStart, InvalidInput)):
            raise error
        if with_trainer:
            summary = self._sum_up(status, poller.snapshot, usage, time.monotonic() - began)
            self._display.summary(stack, summary, error)
        elif error is not None:
            raise error
        return {"finished": 0, "interrupted": 130 if with_trainer else 0}.get(status, 1)

    def _tell_of_servers(self, line: str) -> None:
        specs = [each.spec for each in self._stack.supervisor.processes.values()]
        self._stack.events.report("warning", "servers", with_log(line, specs))

    def _returned(self) -> ReturnedEpisodes:
        stack = self._stack
        workers = 0 if stack.config.offline else stack.config.stack.rollout_workers
        logs = [stack.folder.log_of(f"rollout-{index}") for index in range(workers)]
        return ReturnedEpisodes(logs, partial(stack.events.report, "warning", "rollout"))

    async def _keep_dead_letters(self, snapshot: Snapshot) -> None:
        stack = self._stack
        if snapshot.ledger is None or not snapshot.ledger.counts[TaskState.DEAD_LETTERED]:
            return
        try:
            await keep_dead_letters(
                stack.folder, stack.config.endpoints.buffer, Security.load(stack.config.security)
            )
        except (ArealError, OSError) as error:
            stack.events.report("warning", "buffer", f"dead letters were not written: {error}")

    async def _work(self, interrupt: asyncio.Event) -> tuple[str, ArealError | None]:
        """Runs until the trainer ends, something fails, or a signal arrives."""

        async def work() -> None:
            await self._stack.start(prepare=self._resolved.prepare, source=self._resolved.source)
            self._tell_ready("ready")
            await self._stack.wait()

        working = asyncio.create_task(work())
        interrupted = asyncio.create_task(interrupt.wait())
        either: set[asyncio.Task[Any]] = {working, interrupted}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        interrupted.cancel()
        if not working.done():
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
            return "interrupted", None
        error = working.exception()
        if error is None:
            return "finished", None
        if isinstance(error, ArealError):
            self._tell_ready(str(error))
            return "failed", error
        raise error

    def _handle_signals(self, interrupt: asyncio.Event) -> None:
        def handle() -> None:
            if interrupt.is_set():  # a second signal: kill everything now
                end_tagged(self._stack.stack_id, leaders=self._stack.leaders())
            interrupt.set()

        loop = asyncio.get_running_loop()
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(signum, handle)

    def _tell_ready(self, word: str) -> None:
        if self._ready_fd is not None:
            with contextlib.suppress(OSError):
                os.write(self._ready_fd, f"{word}\n".encode())
                os.close(self._ready_fd)
            self._ready_fd = None

    def _sum_up(
        self, status: str, snapshot: Snapshot, usage: UsageSampler, wall_s: float
    ) -> dict[str, Any]:
        """Writes summary.json and reward.png, which cover all invocations of this run."""
        stack, folder = self._stack, self._stack.folder
        rows = read_rows(folder.metrics_file)
        summary = build_summary(
            status=status,
            rows=rows,
            results=read_results(folder.trainer_file),
            findings=of_config(stack.config) if isinstance(stack.config, GRPOConfig) else (),
            snapshot=snapshot,
            wall_s=wall_s,
            cpu_s=usage.cpu_seconds(),
            memory_mb=usage.peak_mb,
            restarts={n: p.restarts for n, p in stack.processes.items()},
            cause=stack.cause,
        )
        earlier = read_results(folder.summary_file)
        summary = continue_summary(
            earlier, summary, began=stack.started, rows=rows, killed=stack.killed
        )
        try:
            write_json(folder.summary_file, summary)
        except OSError as error:  # a full disk, or a folder that was deleted: it is still shown
            stack.events.report("warning", "stack", f"summary.json was not written: {error}")
        else:
            draw_plot(folder)
        return summary


def draw_plot(folder: RunFolder) -> None:
    """Draws reward.png in a separate process; a failure there is ignored."""
    with contextlib.suppress(subprocess.SubprocessError, OSError):
        subprocess.run(  # noqa: S603 - our own module
            [sys.executable, "-m", "areal_launch.view.plots", str(folder.path)],
            timeout=_PLOT_TIMEOUT_S,
            check=False,
            capture_output=True,
            env=python_environment(),
        )


def run_detached(resolved: Resolved, arguments: list[str]) -> int:
    """Starts `areal up` in a separate session; returns once the stack is ready.

    Raises:
        ArealError: The error of that process, or the end of its output.
    """
    folder = RunFolder(resolved.config.run_dir)
    # Fails here at once, instead of in the other process.
    check_unchanged(resolved.config, accept="--accept-changes" in arguments)
    _make_folder(resolved.config)
    os.close(folder.lock(wait_s=0.0))
    output = folder.log_of("up")
    reading, writing = os.pipe()
    try:
        with output.open("ab") as log:
            process = subprocess.Popen(  # noqa: S603 - our own module
                [
                    *(sys.executable, "-m", "areal_launch.cli"),
                    *("up", *arguments, "--ready-fd", str(writing)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=python_environment(),
                pass_fds=(writing,),
                start_new_session=True,
            )
    finally:
        os.close(writing)
    limit = resolved.config.setup_timeout_s + 30.0
    limit += PREPARE_TIMEOUT_S if resolved.prepare else 0.0
    heard, _, _ = select.select([reading], [], [], limit)
    # "ready" or the reason arrives in one write. A process that ended without either sends nothing.
    answer = os.read(reading, 1 << 16).decode(errors="replace").strip() if heard else ""
    os.close(reading)
    if answer != "ready":
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60.0)  # it cleans up by itself
        raise ArealError(answer or f"the stack did not start ({' | '.join(last_lines(output))})")
    stack = folder.read_stack()
    print(f"ready: {stack['dashboard']}  (log in with the output of `areal token`)")  # noqa: T201
    print("next: areal status, areal submit, areal down")  # noqa: T201
    print(f"run folder: {folder.path}")  # noqa: T201
    return 0


def with_log(line: str, specs: Iterable[ProcessSpec]) -> str:
    """Adds the log of the server that a line begins with, if it is one of these processes.

    SGLang's answer to what it cannot do is often "Internal Server Error"; its log has the reason.
    """
    for spec in specs:
        if spec.address and line.startswith(f"server {spec.address} "):
            return f"{line}; its log: {spec.log}"
    return line
