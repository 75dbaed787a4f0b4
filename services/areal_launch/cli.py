"""The command line: `areal run | up | check | doctor | down | status | scale | submit | logs | …`.

Only arguments live here; each command imports its work when it is called, so `--help` is fast.
Exit codes: 0 done, 1 failed, 2 bad input (nothing was started or changed), 130 interrupted.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from areal.errors import ArealError, InvalidInput

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Asynchronous reinforcement learning for language models.",
)
dead_letters = typer.Typer(no_args_is_help=True, help="Tasks that were given up, and why.")
app.add_typer(dead_letters, name="dead-letters")
versions = typer.Typer(no_args_is_help=True, help="Published policy versions, and who serves them.")
app.add_typer(versions, name="versions")

ConfigOption = Annotated[Path | None, typer.Option("--config", help="The experiment file.")]
RunOption = Annotated[
    Path | None,
    typer.Option("--run", help="Run folder; default: the most recent running one in ./runs."),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="key=value, e.g. gconfig.n_samples=4", metavar="KEY=VALUE"),
]
AcceptOption = Annotated[
    bool,
    typer.Option("--accept-changes", help="Train a trial on with a configuration that changed."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]


class RunsOn(StrEnum):
    """Where `areal run` starts what the recipe needs."""

    LOCAL = "local"
    SLURM = "slurm"
    RAY = "ray"
    KUBERNETES = "kubernetes"


def _finish(work: Callable[[], int]) -> None:
    """Runs a command's body; an error of ours is one line and an exit code.

    2: what was asked for cannot be read or makes no sense. 1: everything else that went wrong.
    """
    try:
        code = work()
    except ArealError as error:
        print(f"areal: {error}", file=sys.stderr)  # noqa: T201 - the one line for people
        code = 2 if isinstance(error, InvalidInput) else 1
    except KeyboardInterrupt:
        code = 130
    raise typer.Exit(code)


@app.command()
def run(
    recipe: Annotated[Path, typer.Argument(help="The recipe: one Python file.")],
    overrides: Overrides = None,
    config: ConfigOption = None,
    json: JsonOption = False,
    on: Annotated[
        RunsOn, typer.Option("--on", help="local, slurm, ray or kubernetes.")
    ] = RunsOn.LOCAL,
    keep: Annotated[
        bool, typer.Option("--keep", help="kubernetes: leave the release when it has finished.")
    ] = False,
    accept_changes: AcceptOption = False,
) -> None:
    """Start everything the recipe needs, on this machine or a cluster; train; clean up.

    The experiment file is RECIPE with the suffix .yaml unless --config names another. What its
    `endpoints` name is used; everything else is started. Running a trial again resumes it.
    """
    from areal_launch.commands.run import run_on

    _finish(
        lambda: run_on(
            on.value,
            recipe,
            config,
            overrides or [],
            as_json=json,
            keep=keep,
            accept_changes=accept_changes,
        )
    )


@app.command()
def up(
    overrides: Overrides = None,
    config: ConfigOption = None,
    recipe: Annotated[
        Path | None, typer.Option(help="Whose prepare_model and configuration class to use.")
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", help="Return once it is ready.")] = False,
    accept_changes: AcceptOption = False,
    ready_fd: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Start a stack without trainer: the configured model is served as version 0."""
    from areal_launch.commands.stack import resolve_up, run_detached, run_foreground

    def work() -> int:
        resolved = resolve_up(recipe, config, overrides or [])
        if detach:
            arguments = [*(overrides or [])]
            for option, value in (("--config", config), ("--recipe", recipe)):
                arguments += [option, str(value)] if value is not None else []
            arguments += ["--accept-changes"] if accept_changes else []
            return run_detached(resolved, arguments)
        return run_foreground(
            resolved, with_trainer=False, ready_fd=ready_fd, accept_changes=accept_changes
        )

    _finish(work)


@app.command()
def config(
    recipe: Annotated[Path, typer.Argument(help="The recipe: one Python file.")],
    overrides: Overrides = None,
    config: ConfigOption = None,
) -> None:
    """Print the experiment file that `areal run` would use, every key of it; start nothing."""
    from areal_launch.commands.stack import print_config

    _finish(lambda: print_config(recipe, config, overrides or []))


@app.command()
def check(
    recipe: Annotated[Path, typer.Argument(help="The recipe: one Python file.")],
    overrides: Overrides = None,
    config: ConfigOption = None,
    json: JsonOption = False,
) -> None:
    """Send the first row through workflow, reward and packing with a fake model; start nothing.

    Rows and workflow are those that the recipe's own main hands over; it runs up to its first
    batch. Exit code 1 when a stage fails. `areal run` does this by itself first.
    """
    from areal_launch.commands.check import check as check_recipe

    _finish(lambda: check_recipe(recipe, config, overrides or [], as_json=json))


@app.command()
def doctor(
    recipe: Annotated[
        Path | None, typer.Argument(help="The recipe, or a model's directory; default: none.")
    ] = None,
    overrides: Overrides = None,
    config: ConfigOption = None,
    json: JsonOption = False,
    on: Annotated[RunsOn, typer.Option("--on", help="local or kubernetes.")] = RunsOn.LOCAL,
) -> None:
    """Look whether a run would work, here or on a cluster, or whether a model can be trained.

    Exit code 1 when it would not.
    """
    from areal_launch.commands.doctor import examine

    _finish(lambda: examine(on.value, recipe, config, overrides or [], as_json=json))


@app.command()
def down(run: RunOption = None) -> None:
    """Stop a running stack."""
    from areal_launch.commands.inspect import stop_stack

    _finish(lambda: stop_stack(run))


@app.command()
def status(run: RunOption = None, json: JsonOption = False) -> None:
    """Show the processes, servers and counters of a running stack."""
    from areal_launch.commands.inspect import show_status

    _finish(lambda: show_status(run, as_json=json))


@app.command()
def token(run: RunOption = None) -> None:
    """Print the token of a running stack: for the dashboard's form, curl, grpcurl.

    The other commands find it by themselves.
    """
    from areal_launch.commands.inspect import show_token

    _finish(lambda: show_token(run))


@app.command()
def scale(
    targets: Annotated[list[str], typer.Argument(help="inference=N", metavar="WHAT=N")],
    run: RunOption = None,
) -> None:
    """Start or drain inference servers of a running stack, without stopping anything."""
    from areal_launch.commands.scale import scale_stack

    _finish(lambda: scale_stack(run, targets))


@app.command()
def logs(
    name: Annotated[str | None, typer.Argument(help="A process; default: all.")] = None,
    run: RunOption = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", help="Of each log, from its end.")] = 20,
) -> None:
    """Print the logs of a stack's processes."""
    from areal_launch.commands.inspect import show_logs

    _finish(lambda: show_logs(run, name, follow=follow, lines=lines))


@app.command()
def submit(
    tasks: Annotated[Path, typer.Argument(help="JSON Lines: one task a line; - reads stdin.")],
    run: RunOption = None,
    workflow: Annotated[str, typer.Option(help="For rows that name none.")] = "rlvr",
    reward: Annotated[
        str,
        typer.Option(
            help="math, multiple_choice or regex; default: the recipe's reward_fn, else math."
        ),
    ] = "",
    recipe: Annotated[
        Path | None, typer.Option(help="The recipe that defines the workflow.")
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Until all have ended.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds to wait at most.")] = 3600.0,
    json: JsonOption = False,
) -> None:
    """Submit tasks to a running stack.

    A line is a dataset row, or {"data": row} with any of task_id, workflow, kwargs, purpose and
    time_to_live_s beside it. A malformed line is named and nothing is submitted.
    """
    from areal_launch.commands.tasks import SubmitOptions, submit_file

    options = SubmitOptions(
        workflow=workflow,
        reward=reward,
        recipe=recipe,
        wait=wait,
        timeout_s=timeout,
        as_json=json,
    )
    _finish(lambda: submit_file(run, tasks, options))


@dead_letters.command("list")
def dead_letters_list(
    run: RunOption = None,
    limit: Annotated[int, typer.Option(help="Newest first.")] = 20,
    json: JsonOption = False,
) -> None:
    """Show dead-lettered tasks with cause and traceback, newest first."""
    from areal_launch.commands.dead_letters import list_dead_letters

    _finish(lambda: list_dead_letters(run, limit, as_json=json))


@dead_letters.command("retry")
def dead_letters_retry(
    task_ids: Annotated[list[str] | None, typer.Argument(help="Default: all.")] = None,
    run: RunOption = None,
    json: JsonOption = False,
) -> None:
    """Queue dead-lettered tasks again with fresh attempts."""
    from areal_launch.commands.dead_letters import retry_dead_letters

    _finish(lambda: retry_dead_letters(run, task_ids or [], as_json=json))


@dead_letters.command("drop")
def dead_letters_drop(
    task_ids: Annotated[list[str] | None, typer.Argument(help="Which; or --all.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="The whole list.")] = False,
    run: RunOption = None,
    json: JsonOption = False,
) -> None:
    """Take tasks off the list for good; they stay counted as dead-lettered."""
    from areal_launch.commands.dead_letters import drop_dead_letters

    _finish(lambda: drop_dead_letters(run, task_ids or [], everything=everything, as_json=json))


EndpointOption = Annotated[
    str, typer.Option(help="host:port of a weight-sync elsewhere; the token is AREAL_TOKEN's.")
]


@versions.command("list")
def versions_list(
    run: RunOption = None, endpoint: EndpointOption = "", json: JsonOption = False
) -> None:
    """Show the versions that are kept, oldest first."""
    from areal_launch.commands.versions import list_versions

    _finish(lambda: list_versions(run, endpoint=endpoint, as_json=json))


@versions.command("show")
def versions_show(
    version: Annotated[int, typer.Argument(help="Policy version: finished train steps.")],
    run: RunOption = None,
    endpoint: EndpointOption = "",
) -> None:
    """Show one version's files, tensors and digests as JSON."""
    from areal_launch.commands.versions import show_version

    _finish(lambda: show_version(run, version, endpoint=endpoint))


def main() -> None:
    """Entry point of the console script."""
    # A shell's `&`, nohup and many CI systems start programs with SIGINT ignored, and Python leaves
    # it so: an interrupt that is sent to this one is meant.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    app(prog_name="areal")


if __name__ == "__main__":
    main()
