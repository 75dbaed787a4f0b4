"""`areal doctor DIRECTORY`: can this model be trained? In a process of its own, which has torch."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import psutil

from areal.errors import WaitTimeout
from areal.tokenizer import Tokenizer
from areal_launch.doctor.findings import Finding, examine, missing, note, ok

_DEADLINE_S = 600.0
_GIB = 1024**3


def examine_model(directory: Path) -> list[Finding]:
    """Checks a model's folder as a trainer would."""
    return examine(
        {
            "architecture": lambda: architecture(directory),
            "tokenizer": lambda: tokenizer_ids(directory),
        }
    )


def tokenizer_ids(directory: Path) -> Finding:
    """Compares the tokenizer's ids with the rows of the model's embedding.

    Raises:
        InvalidInput: A file is malformed.
    """
    if not (directory / "tokenizer.json").is_file():
        return note("no tokenizer.json", "copy the tokenizer's files into the folder")
    tokenizer = Tokenizer.load(directory)
    known: dict[str, int] = tokenizer.backend.get_vocab(with_added_tokens=True)
    beyond = {token: id_ for token, id_ in known.items() if id_ >= tokenizer.vocab_size}
    if not beyond:
        return ok(f"{len(known)} tokens for an embedding of {tokenizer.vocab_size} rows")
    first = min(beyond, key=beyond.__getitem__)
    return missing(
        f"{len(beyond)} tokens have ids beyond the embedding's {tokenizer.vocab_size} rows "
        f"(vocab_size in config.json); the first is {first!r}, {beyond[first]}",
        "resize the model's embedding, or use the tokenizer that belongs to the model",
    )


def architecture(directory: Path) -> Finding:
    """Loads the model and compares packed sequences with single ones, as a trainer does at start.

    Raises:
        WaitTimeout: it took ten minutes.
    """
    # 16-bit weights are loaded in 32 bits.
    needed = 2 * sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    free = psutil.virtual_memory().available
    if needed > free:
        found = (
            f"not tried: needs about {needed / _GIB:.0f} GiB of memory; {free / _GIB:.0f} available"
        )
        return note(found, "nothing to fix: the trainer runs the same test at its start")
    since = time.monotonic()
    command = [sys.executable, "-m", "areal.engines.model.examine", str(directory)]
    try:
        done = subprocess.run(  # noqa: S603 - our own module
            command, capture_output=True, text=True, timeout=_DEADLINE_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise WaitTimeout("the self-test", on=str(directory), since=since) from None
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return missing(last, "pip install 'areal-services[trainer]', or see the message")
    result = json.loads(done.stdout.splitlines()[-1])
    if "refused" in result:
        return missing(result["refused"], "choose a model that docs/models.md lists")
    weights = "random weights" if result["random_weights"] else "its weights"
    return ok(
        f"{result['architecture']}: packed logprobs are within {result['difference']:.1g} nats of "
        f"each sequence alone (at most {result['tolerance']:g}; {result['dtype']}, {weights}, "
        f"{result['layers'] or 'all'} layers, {result['seconds']:.1f} s)",
    )
