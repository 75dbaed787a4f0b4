"""Brings a version with its tokenizer to where an engine starts from: servers without a volume.

python -m areal.weights.fetch http://weight-sync:8500/versions/v00000000-inc0 /model
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from areal.chassis.logging import configure_logging, get_logger
from areal.errors import ArealError, InvalidInput
from areal.security import Security, SecurityConfig
from areal.weights.publisher import TransportError
from areal.weights.pull import TIMEOUT_S, pull_file, split_location
from areal.weights.store_client import StoreConnection

_TRY_AGAIN_S = 1.0


def fetch_model(location: str, headers: Mapping[str, str], folder: Path) -> int:
    """Writes everything that an engine reads into a folder; blocking.

    Args:
        location: http://host:port/versions/NAME.
        headers: The bearer token.
        folder: Made if it is missing.

    Returns:
        How many files it is.

    Raises:
        InvalidInput: What came is not what the store announced.
        TransportError: The store is away or refuses, or `folder` cannot be written.
    """
    url, name = split_location(location)
    with StoreConnection(url, headers, TIMEOUT_S) as store:
        files = {file.name: file for file in store.companions(name)}
        files |= {file.name: file for file in store.manifest(name).files}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file in files.values():
            if Path(file.name).name != file.name:
                raise InvalidInput(f"{location}: file name {file.name!r}")
            pull_file(url, name, headers, file, folder / file.name)
    except OSError as error:
        raise TransportError(f"{folder}: {error.strerror or error}") from None
    return len(files)


def run(
    location: Annotated[str, typer.Argument(help="http://host:port/versions/NAME.")],
    folder: Annotated[Path, typer.Argument(help="Where the files go.")],
    token_file: Annotated[str, typer.Option(help="Bearer token; default: AREAL_TOKEN.")] = "",
    wait: Annotated[float, typer.Option(help="Seconds until the store must have it.")] = 1800.0,
) -> None:
    """Fetches, once the store is there and has it."""
    configure_logging("fetch", "")
    log, began, told = get_logger("areal.weights.fetch"), time.monotonic(), ""
    headers = Security.load(SecurityConfig(token_file=token_file)).headers()
    while True:
        try:
            count = fetch_model(location, headers, folder)
            log.info("fetched", source=location, folder=str(folder), files=count)
            return
        except ArealError as error:
            waited = time.monotonic() - began
            if isinstance(error, InvalidInput) or waited > wait:
                sys.exit(f"waited {waited:.0f} s for {location}: {error}")
            if str(error) != told:
                log.info("not_yet", cause=str(error))
            told = str(error)
        time.sleep(_TRY_AGAIN_S)  # a store that is not there yet tells no one when it comes


if __name__ == "__main__":
    typer.run(run)
