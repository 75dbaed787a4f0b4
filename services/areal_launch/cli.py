"""The command line: `areal run | up | check | doctor | down | status | scale | submit | logs | …`.

Only arguments are here; each command imports its code when it is called, so `--help` is fast.
Exit codes: 0 done, 1 failed, 2 bad input (nothing was started or changed), 130 interrupted.
"""

from __future__ import annotations

import signal
import sys
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated

import typer
from typer.core import TyperGroup

from areal.errors import ArealError, InvalidInput
from areal.rewards import BUILTIN
from areal.security import redact
from areal_launch.arguments import (
    RECIPE_HELP,
    AcceptChanges,
    AnyRun,
    Config,
    ExportAs,
    Json,
    On,
    Overrides,
    Recipe,
    RolloutsOf,
    Run,
    RunsOn,
)
from areal_launch.subcommands import dead_letters, versions
from areal_launch.utf8 import restart_in_utf8
from areal_launch.view.output import warn, whole_output


class _Commands(TyperGroup):
    def invoke(self, ctx: typer.Context) -> None:  # type: ignore[override]
        """Runs a command and exits with the code it returns; prints one of our errors as one line.

        Exit code 2: the input cannot be read or makes no sense. 1: any other error.
        """
        try:
            code = super().invoke(ctx)
        except ArealError as error:
            warn(redact(str(error)))
            code = 2 if isinstance(error, InvalidInput) else 1
        except KeyboardInterrupt:
            code = 130
        ctx.exit(code or 0)


app = typer.Typer(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Asynchronous reinforcement learning for language models.",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from areal_launch.commands.version import version_line

        typer.echo(version_line())
        raise typer.Exit


Version = Annotated[
    bool,
    typer.Option(
        "--version", is_eager=True, callback=_show_version, help="Print the version and exit."
    ),
]


@app.callback()
def _options(version: Version = False) -> None:
    del version


app.add_typer(dead_letters, name="dead-letters")
app.add_typer(versions, name="versions")


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


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(help="A new folder; its name is the experiment's.")],
    kind: Annotated[
        str, typer.Option(help="rlvr, multi-turn, tool, agent, sft, own-loss.")
    ] = "rlvr",
) -> int:
    """Write a recipe to start from: a folder with recipe.py and recipe.yaml."""
    from areal_launch.commands.init import write_recipe

    return write_recipe(folder, kind)


@app.command("eval")
def evaluate(
    recipe: Annotated[
        str | None,  # a Path would turn the // of an override's url into /
        typer.Argument(help=f"{RECIPE_HELP} Default: examples/eval_only.py."),
    ] = None,
    overrides: Overrides = None,
    config: Config = None,
    json: Json = False,
    accept_changes: AcceptChanges = False,
    checkpoint: Annotated[
        str,
        typer.Option(
            help="best, latest, a step, or start (model.path). Default: latest, or start if you "
            "write model.path=…",
        ),
    ] = "",
    against: Annotated[
        str, typer.Option(help="Compare with another checkpoint, row by row; named likewise.")
    ] = "",
) -> int:
    """Run a recipe's own evaluations on a checkpoint of its trial; train nothing.

    The rows, workflow and reward are those that the recipe's main evaluates with
    before it asks for its first batch. If rows have several answers
    (gconfig.n_samples=8), the result has pass@k.

    Without a recipe, a reward function scores a model's answers to dataset rows:
    areal eval model.path=Qwen/Qwen2.5-1.5B-Instruct rows=200
    """
    from areal_launch.commands.builtin_recipes import find_recipe
    from areal_launch.commands.evaluate import evaluate_recipe
    from areal_launch.commands.run import run_on
    from areal_launch.view.output import lasting_output

    values = overrides or []
    if recipe is not None and "=" not in recipe.partition("/")[0]:
        if accept_changes:
            raise InvalidInput("--accept-changes: expected no recipe with it: its trial stays")
        with lasting_output():
            return evaluate_recipe(
                *(Path(recipe), config, values),
                checkpoint=checkpoint,
                against=against,
                as_json=json,
            )
    if checkpoint or against:
        raise InvalidInput("--checkpoint, --against: expected a recipe, whose trial has them")
    values = [recipe, *values] if recipe is not None else values
    found, chosen = find_recipe(Path("trainer.type=null"), values)
    with lasting_output():
        return run_on(
            RunsOn.LOCAL,
            found,
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
    recipe: Annotated[Path | None, typer.Argument(help=RECIPE_HELP)] = None,
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
        if recipe or overrides or config:
            beside = recipe or config or (overrides or [""])[0]
            raise InvalidInput(
                f"areal config --from-areal FILE: expected no {str(beside)!r} with it"
            )
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
            help=f"Reward function: {', '.join(BUILTIN)}, or one of the recipe; default: the "
            "recipe's reward_fn if it has one, else math."
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


def main() -> None:
    """Entry point of the console script."""
    restart_in_utf8()
    if isinstance(sys.stderr, TextIOWrapper):  # as for stdout
        sys.stderr.reconfigure(errors="backslashreplace")
    # A shell's `&`, nohup and many CI systems start programs with SIGINT ignored, and Python keeps
    # it ignored. An interrupt sent to this process is intended, so handle it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with whole_output():
        app(prog_name="areal")


if __name__ == "__main__":
    main()
