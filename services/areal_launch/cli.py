"""The command line: `areal run | up | check | doctor | down | status | scale | submit | logs | …`.

Only arguments are here; each command imports its code when it is called, so `--help` is fast.
Exit codes: 0 done, 1 failed, 2 bad input (nothing was started or changed), 130 interrupted.
"""

from __future__ import annotations

import signal
import sys
from enum import StrEnum
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated

import typer
from typer.core import TyperGroup

from areal.errors import ArealError, InvalidInput
from areal_launch.utf8 import restart_in_utf8


class _Commands(TyperGroup):
    def invoke(self, ctx: typer.Context) -> None:  # type: ignore[override]
        """Runs a command and exits with the code it returns; prints one of our errors as one line.

        Exit code 2: the input cannot be read or makes no sense. 1: any other error.
        """
        try:
            code = super().invoke(ctx)
        except ArealError as error:
            print(f"areal: {error}", file=sys.stderr)  # noqa: T201 - the one line for people
            code = 2 if isinstance(error, InvalidInput) else 1
        except KeyboardInterrupt:
            code = 130
        ctx.exit(code or 0)


app = typer.Typer(
    cls=_Commands,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Asynchronous reinforcement learning for language models.",
)
dead_letters = typer.Typer(
    no_args_is_help=True, help="Show, retry, or drop tasks that failed permanently."
)
app.add_typer(dead_letters, name="dead-letters")
versions = typer.Typer(
    no_args_is_help=True, help="Show published policy versions, or export a checkpoint."
)
app.add_typer(versions, name="versions")


class RunsOn(StrEnum):
    """Where `areal run` starts the processes of a run."""

    LOCAL = "local"
    SLURM = "slurm"
    RAY = "ray"
    KUBERNETES = "kubernetes"


class ExportAs(StrEnum):
    """Formats in which `areal export` writes kept trajectories."""

    ROWS = "rows"
    SFT = "sft"
    PREFERENCES = "preferences"
    INSPECT = "inspect"


Recipe = Annotated[Path, typer.Argument(help="The recipe: one Python file.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Configuration values, e.g. gconfig.n_samples=4.", metavar="KEY=VALUE"),
]
Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        help="Experiment file; default: the recipe's path with suffix .yaml, if it exists.",
    ),
]
Run = Annotated[
    Path | None,
    typer.Option("--run", help="Run folder; default: that of the newest active run in ./runs."),
]
_NEWEST = (
    "default: that of the newest active run in ./runs or, if none is active, of the newest run."
)
AnyRun = Annotated[Path | None, typer.Option("--run", help=f"Run folder; {_NEWEST}")]
RolloutsOf = Annotated[
    str,
    typer.Option(
        "--run",
        help="Run folder, or the URL of a run's kept rollouts in an object store, "
        f"s3://bucket/prefix-rollouts; {_NEWEST}",
    ),
]
AcceptChanges = Annotated[
    bool,
    typer.Option("--accept-changes", help="Continue a trial whose configuration has changed."),
]
Json = Annotated[bool, typer.Option("--json", help="Print machine-readable JSON.")]
On = Annotated[RunsOn, typer.Option("--on", help="Where to start the run's processes.")]
Endpoint = Annotated[
    str,
    typer.Option(help="host:port of a remote weight-sync service; set AREAL_TOKEN to its token."),
]

BufferEndpoint = Annotated[
    str,
    typer.Option(
        "--endpoint", help="host:port of a remote buffer service; set AREAL_TOKEN to its token."
    ),
]


@app.command()
def run(
    recipe: Recipe,
    overrides: Overrides = None,
    config: Config = None,
    json: Json = False,
    on: On = RunsOn.LOCAL,
    keep: Annotated[
        bool, typer.Option("--keep", help="Kubernetes: keep the release after training.")
    ] = False,
    accept_changes: AcceptChanges = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Kubernetes, Slurm: print what would be made, and stop."),
    ] = False,
) -> int:
    """Start everything the recipe needs, here or on a cluster, then train and clean up.

    Running a trial again resumes it. A service whose address is in the
    `endpoints` section of the experiment file is used; all others are started.
    Instead of a recipe, you can write trainer.type=TYPE to run one of the
    repository's recipes: grpo, ppo, sft, rw, dpo, distill, or null (evaluation
    only).
    """
    from areal_launch.commands.builtin_recipes import find_recipe
    from areal_launch.commands.run import run_on
    from areal_launch.view.output import lasting_output

    recipe, chosen = find_recipe(recipe, overrides or [])
    if dry_run:
        from areal_launch.commands.dry_run import describe_run

        typer.echo(describe_run(on, recipe, config, chosen))
        return 0
    with lasting_output():
        return run_on(
            on, recipe, config, chosen, as_json=json, keep=keep, accept_changes=accept_changes
        )


@app.command("eval")
def evaluate(
    overrides: Overrides = None,
    config: Config = None,
    json: Json = False,
    accept_changes: AcceptChanges = False,
) -> int:
    """Evaluate a model without training: a reward function scores its answers to dataset rows.

    For example: areal eval model.path=Qwen/Qwen2.5-1.5B-Instruct rows=200. The
    recipe is examples/eval_only.py.
    """
    from areal_launch.commands.builtin_recipes import find_recipe
    from areal_launch.commands.run import run_on
    from areal_launch.view.output import lasting_output

    recipe, chosen = find_recipe(Path("trainer.type=null"), overrides or [])
    with lasting_output():
        return run_on(
            RunsOn.LOCAL,
            recipe,
            config,
            chosen,
            as_json=json,
            keep=False,
            accept_changes=accept_changes,
        )


@app.command()
def serve(
    model: Annotated[
        str,
        typer.Argument(help="A folder, org/name on the Hugging Face Hub, or s3://bucket/folder."),
    ],
    overrides: Overrides = None,
    servers: Annotated[int, typer.Option(min=1, max=64, help="Number of servers.")] = 1,
    port: Annotated[
        int,
        typer.Option(
            min=1,
            max=65000,
            help="Port of the first server; the others take the next ports, or any free ones.",
        ),
    ] = 30000,
    gpus: Annotated[int, typer.Option(min=0, help="GPUs per server; 0: CPU engine.")] = 0,
) -> int:
    """Start inference servers for a model, print their addresses, and serve until Ctrl-C.

    They speak SGLang's protocol and the chat APIs of OpenAI and Anthropic.
    Without --gpus, the CPU engine serves the model. With --gpus, SGLang does:
    run `make sglang-gpu` first, or set stack.inference_command.
    """
    from areal_launch.commands.serve import serve_model
    from areal_launch.view.output import lasting_output

    with lasting_output():
        return serve_model(model, overrides or [], servers=servers, port=port, gpus=gpus)


@app.command()
def up(
    overrides: Overrides = None,
    config: Config = None,
    recipe: Annotated[
        Path | None,
        typer.Option(help="Recipe whose config class and prepare_model are used."),
    ] = None,
    detach: Annotated[
        bool, typer.Option("--detach", help="Return as soon as the stack is up.")
    ] = False,
    accept_changes: AcceptChanges = False,
    ready_fd: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> int:
    """Start a stack without a trainer: it serves the configured model as version 0."""
    from areal_launch.clusters.base import Cluster
    from areal_launch.commands.stack import resolve_up, run_detached, run_foreground
    from areal_launch.doctor.gpus import refuse_unusable
    from areal_launch.doctor.settle import settle_here
    from areal_launch.view.output import lasting_output, say

    resolved = resolve_up(recipe, config, overrides or [])
    settled = settle_here(resolved.config, resolved.source, with_trainer=False)
    if settled.why:
        say(settled.why)
    refuse_unusable(resolved.config, with_trainer=False)
    if not detach:
        with lasting_output():
            return run_foreground(
                resolved,
                with_trainer=False,
                ready_fd=ready_fd,
                accept_changes=accept_changes,
                cluster=Cluster(settled.servers_part),
            )
    arguments = [*(overrides or [])]
    for option, value in (("--config", config), ("--recipe", recipe)):
        arguments += [option, str(value)] if value is not None else []
    return run_detached(resolved, arguments + ["--accept-changes"] * accept_changes)


@app.command()
def config(
    recipe: Annotated[Path | None, typer.Argument(help="The recipe: one Python file.")] = None,
    overrides: Overrides = None,
    config: Config = None,
    from_areal: Annotated[
        Path | None,
        typer.Option(help="Instead, convert this AReaL experiment file and print the result."),
    ] = None,
) -> int:
    """Print the complete experiment file that `areal run` would use; start nothing."""
    from areal_launch.commands.builtin_recipes import find_recipe
    from areal_launch.commands.from_areal import converted_yaml
    from areal_launch.commands.stack import print_config

    if from_areal is not None:
        sys.stdout.write(converted_yaml(from_areal))
        return 0
    if recipe is None:
        raise InvalidInput("areal config: expected a recipe, or --from-areal FILE")
    recipe, chosen = find_recipe(recipe, overrides or [])
    return print_config(recipe, config, chosen)


@app.command()
def check(
    recipe: Recipe, overrides: Overrides = None, config: Config = None, json: Json = False
) -> int:
    """Run the first row through workflow, reward, and packing with a fake model; start nothing.

    The rows and the workflow come from the recipe's own main, which runs up to
    its first batch. The exit code is 1 if a stage fails. `areal run` on this
    machine runs this check first.
    """
    from areal_launch.commands.builtin_recipes import find_recipe
    from areal_launch.commands.check import check as check_recipe

    recipe, chosen = find_recipe(recipe, overrides or [])
    return check_recipe(recipe, config, chosen, as_json=json)


@app.command()
def doctor(
    recipe: Annotated[
        str | None,  # a Path would turn the // of an override's url into /
        typer.Argument(help="The recipe, or a model's folder."),
    ] = None,
    overrides: Overrides = None,
    config: Config = None,
    json: Json = False,
    on: Annotated[
        RunsOn,
        typer.Option(
            "--on",
            help="Where the run would start. For slurm and ray, only this machine is checked.",
        ),
    ] = RunsOn.LOCAL,
    gpu: Annotated[
        bool,
        typer.Option(
            "--gpu", help="Try the GPUs, too: CUDA, a train step, NCCL, and SGLang's environment."
        ),
    ] = False,
) -> int:
    """Check whether a run can start, here or on a cluster, and say how to fix what is missing.

    No run is started. For a model's folder, check whether that model can be
    trained. The exit code is 1 if something is missing. With --gpu, it takes
    a minute longer.
    """
    from areal_launch.commands.builtin_recipes import find_recipe
    from areal_launch.commands.doctor import examine

    values = overrides or []
    if any(value.startswith("trainer.type=") for value in [recipe or "", *values]):
        chosen, values = find_recipe(Path(recipe or ""), values)
        recipe = str(chosen)
    if recipe is not None and "=" in recipe and "/" not in recipe.partition("=")[0]:
        values = [recipe, *values]
        recipe = None
    chosen_file = Path(recipe) if recipe else None
    return examine(on, chosen_file, config, values, as_json=json, try_gpus=gpu)


@app.command()
def down(run: Run = None) -> int:
    """Stop a running stack."""
    from areal_launch.commands.inspect import stop_stack

    return stop_stack(run)


@app.command()
def status(run: Run = None, json: Json = False) -> int:
    """Show processes, servers, waits, and counters of a running stack."""
    from areal_launch.commands.inspect import show_status

    return show_status(run, as_json=json)


@app.command()
def token(run: Run = None) -> int:
    """Print the token of a running stack: for the dashboard, curl, or grpcurl.

    Other areal commands find the token by themselves.
    """
    from areal_launch.commands.inspect import show_token

    return show_token(run)


@app.command()
def scale(
    targets: Annotated[
        list[str],
        typer.Argument(help="How many servers to run, e.g. inference=4.", metavar="WHAT=N"),
    ],
    run: Run = None,
) -> int:
    """Change the number of inference servers of a running stack; training continues."""
    from areal_launch.commands.scale import scale_stack

    return scale_stack(run, targets)


@app.command()
def logs(
    name: Annotated[str | None, typer.Argument(help="Name of a process; default: all.")] = None,
    run: AnyRun = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print new lines until Ctrl-C.")
    ] = False,
    lines: Annotated[
        int, typer.Option("--lines", "-n", help="Lines to print from the end of each log.")
    ] = 20,
) -> int:
    """Print the logs of a stack's processes."""
    from areal_launch.commands.inspect import show_logs

    return show_logs(run, name, follow=follow, lines=lines)


@app.command()
def submit(
    tasks: Annotated[Path, typer.Argument(help="JSON Lines file, one task per line; - for stdin.")],
    run: Run = None,
    workflow: Annotated[str, typer.Option(help="Workflow for tasks that name none.")] = "rlvr",
    reward: Annotated[
        str,
        typer.Option(
            help="Reward function: math, multiple_choice or regex; default: the recipe's "
            "reward_fn if it has one, else math."
        ),
    ] = "",
    recipe: Annotated[
        Path | None, typer.Option(help="Recipe that defines the workflow or the reward.")
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for all tasks to finish.")] = False,
    timeout: Annotated[
        float, typer.Option(help="Time limit for the whole command, in seconds.")
    ] = 3600.0,
    json: Json = False,
) -> int:
    """Submit tasks to a running stack.

    A line is a dataset row, or {"data": row} with any of task_id, workflow,
    kwargs, purpose, and time_to_live_s next to it. If a line is invalid, the
    error names it, and nothing is submitted.
    """
    from areal_launch.commands.tasks import SubmitOptions, submit_file

    options = SubmitOptions(workflow, reward, recipe, wait, timeout, json)
    return submit_file(run, tasks, options)


@app.command()
def show(
    task: Annotated[str, typer.Argument(help="A task id; default: all groups of a step.")] = "",
    step: Annotated[
        int | None, typer.Option(help="Number of a step; default: the newest one that is stored.")
    ] = None,
    discarded: Annotated[
        bool, typer.Option("--discarded", help="Show groups that were not trained on, and why.")
    ] = False,
    run: RolloutsOf = "",
    json: Json = False,
) -> int:
    """Show what a step trained on: its groups, or one task's texts, tokens, and rewards."""
    from areal_launch.commands.rollouts import show as show_rollouts

    return show_rollouts(run, task, step, discarded=discarded, as_json=json)


@app.command()
def export(
    to: Annotated[
        Path, typer.Option(help="A new .parquet or .jsonl file; with --as inspect, .json.")
    ],
    kind: Annotated[
        ExportAs,
        typer.Option(
            "--as",
            help="rows: all trajectories; sft: rows for SFT; preferences: pairs for DPO; "
            "inspect: a log for inspect_ai that also has samples that were not trained on.",
        ),
    ] = ExportAs.ROWS,
    first: Annotated[
        int | None, typer.Option(help="First step to export; default: the oldest stored one.")
    ] = None,
    last: Annotated[
        int | None, typer.Option(help="Last step to export; default: the newest stored one.")
    ] = None,
    run: RolloutsOf = "",
) -> int:
    """Write a file with the trajectories that a run trained on."""
    from areal_launch.commands.rollouts import export as export_rollouts

    return export_rollouts(run, to, kind.value, first, last)


@dead_letters.command("list")
def dead_letters_list(
    run: AnyRun = None,
    endpoint: BufferEndpoint = "",
    limit: Annotated[int, typer.Option(help="Maximum number of tasks to list.")] = 20,
    json: Json = False,
) -> int:
    """Show tasks that failed permanently, newest first, with cause and traceback."""
    from areal_launch.commands.dead_letters import list_dead_letters

    return list_dead_letters(run, limit, as_json=json, endpoint=endpoint)


@dead_letters.command("retry")
def dead_letters_retry(
    task_ids: Annotated[
        list[str] | None, typer.Argument(help="Ids of the tasks; default: all.")
    ] = None,
    run: Run = None,
    endpoint: BufferEndpoint = "",
    json: Json = False,
) -> int:
    """Queue tasks again; each gets its full number of attempts."""
    from areal_launch.commands.dead_letters import retry_dead_letters

    return retry_dead_letters(run, task_ids or [], as_json=json, endpoint=endpoint)


@dead_letters.command("drop")
def dead_letters_drop(
    task_ids: Annotated[list[str] | None, typer.Argument(help="Task ids, or --all.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Drop all dead letters.")] = False,
    run: Run = None,
    endpoint: BufferEndpoint = "",
    json: Json = False,
) -> int:
    """Remove tasks from the list of dead letters; the counters still include them."""
    from areal_launch.commands.dead_letters import drop_dead_letters

    return drop_dead_letters(
        run, task_ids or [], everything=everything, as_json=json, endpoint=endpoint
    )


@versions.command("list")
def versions_list(run: AnyRun = None, endpoint: Endpoint = "", json: Json = False) -> int:
    """Show the stored versions, oldest first."""
    from areal_launch.commands.versions import list_versions

    return list_versions(run, endpoint=endpoint, as_json=json)


@versions.command("show")
def versions_show(
    version: Annotated[
        int, typer.Argument(help="Policy version, which is the number of finished train steps.")
    ],
    run: AnyRun = None,
    endpoint: Endpoint = "",
) -> int:
    """Show one version's files, tensors, and digests as JSON."""
    from areal_launch.commands.versions import show_version

    return show_version(run, version, endpoint=endpoint)


@versions.command("export")
def versions_export(
    which: Annotated[str, typer.Argument(help="best, latest, or the step of a checkpoint.")],
    to: Annotated[Path, typer.Option(help="Folder to create.")],
    run: AnyRun = None,
) -> int:
    """Write a checkpoint as a Hugging Face folder with tokenizer and model card."""
    from areal_launch.commands.versions import export_version

    return export_version(run, which, to)


def main() -> None:
    """Entry point of the console script."""
    restart_in_utf8()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # what a model wrote may hold half a surrogate pair
            stream.reconfigure(errors="backslashreplace")
    # A shell's `&`, nohup and many CI systems start programs with SIGINT ignored, and Python keeps
    # it ignored. An interrupt sent to this process is intended, so handle it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    app(prog_name="areal")


if __name__ == "__main__":
    main()
