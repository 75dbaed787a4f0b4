"""Arguments and options that several commands take."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


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


RECIPE_HELP = "The recipe: a Python file, or a folder with recipe.py."
Recipe = Annotated[Path, typer.Argument(help=RECIPE_HELP)]
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
    typer.Option(
        "--run",
        help="Run folder, or TRIAL or EXPERIMENT/TRIAL of one in ./runs; default: that of the "
        "newest active run there.",
    ),
]
_NEWEST = (
    "default: that of the newest active run in ./runs or, if none is active, of the newest run."
)
_NAMED = "Run folder, or TRIAL or EXPERIMENT/TRIAL of one in ./runs"
AnyRun = Annotated[Path | None, typer.Option("--run", help=f"{_NAMED}; {_NEWEST}")]
RolloutsOf = Annotated[
    str,
    typer.Option(
        "--run",
        help=f"{_NAMED}, or the URL of a run's kept rollouts in an object store, "
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

_OF_BUFFER = "host:port of a remote buffer service; set AREAL_TOKEN to its token."
BufferEndpoint = Annotated[str, typer.Option("--endpoint", help=_OF_BUFFER)]
