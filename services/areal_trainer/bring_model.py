"""`python -m areal_trainer.bring_model`: version 0 onto the volume, once.

    ready already? ── yes ──> done
      │ no
      ├── source hf://org/name[@revision] ──> fetched, digests compared ───┐
      ├── source s3://bucket/folder ───────────> fetched, lengths compared ─┤
      ├── source /folder, of another claim ──> copied ─────────────────────┤
      ├── the recipe's prepare_model ──────────────────────────────────────┼──> MODEL.ready
      └── none of them: waits until a person has copied it ────────────────┘

The chart's Job `prepare`, and the first process of `areal run` with such a `model.path`. Pods that
read the model wait for `MODEL.ready`; what is interrupted anywhere above is continued by the next
try.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from areal.config.model_origin import HUB
from areal.config.transports import in_object_store
from areal.errors import ArealError, InvalidInput
from areal_trainer import model_sources
from areal_trainer.model_folder import lacks, mark_ready, ready_file, ready_from
from areal_trainer.prepare import make_model


def main(
    config: Annotated[Path, typer.Option(help="The experiment file.")],
    model: Annotated[Path, typer.Option(help="The model's folder.")],
    source: Annotated[
        str, typer.Option(help="Where to copy it from: hf://…, s3://… or a folder.")
    ] = "",
    deadline: Annotated[float, typer.Option(help="Time limit, in seconds.")] = 21600.0,
) -> None:
    """Puts the model into its folder; the exit code is 2 if a person must fix something first."""
    signal.signal(signal.SIGTERM, _leave)
    try:
        bring(config, model, source, time.monotonic() + deadline)
    except ArealError as error:
        print(f"areal-trainer: {error}", file=sys.stderr, flush=True)  # noqa: T201 - for people
        # Exit at once: otherwise Python waits for threads of an abandoned download.
        os._exit(2 if isinstance(error, InvalidInput) else 1)
    except OSError as error:
        file = Path(str(error.filename or ""))
        if not file.is_relative_to(model.parent):
            raise  # of a recipe's own files
        print(  # noqa: T201
            f"areal-trainer: {str(file)!r}: {error.strerror}: uid {os.getuid()} must be able to "
            f"write in {str(model.parent)!r}",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)


def bring(config: Path, model: Path, source: str, deadline: float) -> None:
    """See the module's picture.

    Args:
        config: The experiment file.
        model: The folder, whatever `model.path` says: relative paths are the caller's.
        source: Where the model comes from; "": the recipe, or a person.
        deadline: `time.monotonic()`.

    Raises:
        InvalidInput: Another model is there already, or the source has no whole one.
        WaitTimeout: The model did not arrive in time.
    """
    before = ready_from(model)
    if before is not None:
        if source and before and before != source:
            raise InvalidInput(
                f"prepare.source {source}: {model} already holds {before}, and a trial's version 0 "
                "does not change; set model.path to another folder"
            )
        _say(f"{model} is ready")
        return
    ready_file(model).unlink(missing_ok=True)
    if source:
        model.mkdir(parents=True, exist_ok=True)
        if source.startswith(HUB):
            work = lambda: model_sources.fetch(source, model, say=_say)  # noqa: E731
        elif in_object_store(source):
            work = lambda: model_sources.fetch_objects(source, model, say=_say)  # noqa: E731
        else:
            work = lambda: model_sources.copy(Path(source), model)  # noqa: E731
        model_sources.until_deadline(work, model, deadline, _say)
        if problem := lacks(model):
            raise InvalidInput(f"prepare.source {source}: {problem}")
    elif make_model(config):
        if not (model / "config.json").is_file():
            raise InvalidInput(
                f"model.path {model}: the recipe's prepare_model wrote no config.json there"
            )
    else:
        model_sources.wait_for_copy(model, how=_how(model), deadline=deadline, say=_say)
    mark_ready(model, source)
    _say(f"{model} is ready")


def _how(model: Path) -> str:
    pod = f"{os.environ.get('POD_NAMESPACE', 'NAMESPACE')}/{os.environ.get('HOSTNAME', 'POD')}"
    return f"kubectl cp -c prepare FOLDER {pod}:{model}"


def _say(text: str) -> None:
    print(f"areal-trainer: {text}", flush=True)  # noqa: T201 - the Job's log is for people


def _leave(*_: object) -> None:
    # The first process of a container is not ended by SIGTERM otherwise, nor are threads.
    os._exit(143)


if __name__ == "__main__":
    typer.run(main)
