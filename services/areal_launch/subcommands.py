"""Verbs of two words: `areal dead-letters …` and `areal versions …`.

Like `cli.py`, this file holds arguments only; each command imports its code when it is called.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from areal_launch.arguments import AnyRun, BufferEndpoint, Endpoint, Json, Run

dead_letters = typer.Typer(
    no_args_is_help=True, help="Show, retry, or drop tasks that failed permanently."
)
versions = typer.Typer(
    no_args_is_help=True, help="Show published policy versions, or export a checkpoint."
)


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
