"""`areal doctor DIRECTORY`: can this model be trained, and how fast does a CPU engine serve it?

In processes of their own, which have torch.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from pathlib import Path

import psutil

from areal.errors import InvalidInput, WaitTimeout
from areal.model_directory import refuse_quantized, serving_dtype
from areal.tokenizer import Tokenizer
from areal_launch.doctor.findings import Check, Finding, examine, missing, note, ok, unknown
from areal_launch.processes.process import python_environment

_DEADLINE_S = 600.0
_GIB = 1024**3
# What other programs call files of weights that nothing here reads.
_OTHER_WEIGHTS = (
    "pytorch_model*.bin",
    "*.gguf",
    "consolidated*.pth",
    "tf_model*.h5",
    "flax_model*.msgpack",
)
_INSTALL = "pip install 'areal-services[trainer]'"


def examine_model(directory: Path) -> list[Finding]:
    """Checks a model's folder as a trainer and, if it has 16 bits, as the CPU engine would."""
    checks: dict[str, Check] = {
        "architecture": lambda: architecture(directory),
        "tokenizer": lambda: tokenizer_ids(directory),
    }
    with contextlib.suppress(InvalidInput):  # the first check says what is wrong
        refuse_quantized(directory)
        if serving_dtype("auto", directory, gpu=False) == "bfloat16":
            checks["CPU engine"] = lambda: cpu_engine(directory)
    return examine(checks)


def cpu_engine(directory: Path) -> Finding:
    """Times products of matrices, as the CPU engine does at its start.

    Raises:
        WaitTimeout: It took ten minutes.
    """
    stored = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    done = _run("the timed product", ["areal_torch.models.cpu_matmul", str(stored // 2)], directory)
    if done.returncode != 0:
        return unknown(_last_line(done), _advice(done))
    result = json.loads(done.stdout.splitlines()[-1])
    return ok(f"would keep the bfloat16 weights as {result['storage']}: {result['why']}")


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
        InvalidInput: The weights are quantized.
        WaitTimeout: It took ten minutes.
    """
    if (directory / "config.json").is_file():
        refuse_quantized(directory)
    if other := _only_other_weights(directory):
        return other
    # 16-bit weights are loaded in 32 bits.
    needed = 2 * sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    free = psutil.virtual_memory().available
    if needed > free:
        found = (
            f"not tried: needs about {needed / _GIB:.0f} GiB of memory; {free / _GIB:.0f} available"
        )
        return note(found, "nothing to fix: the trainer runs the same test at its start")
    done = _run("the self-test", ["areal_torch.engines.model.examine", str(directory)], directory)
    if done.returncode != 0:
        return missing(_last_line(done), _advice(done))
    result = json.loads(done.stdout.splitlines()[-1])
    if "refused" in result:
        return missing(result["refused"], "see the message, or choose a model of docs/models.md")
    weights = "random weights" if result["random_weights"] else "its weights"
    return ok(
        f"{result['architecture']}: packed logprobs are within {result['difference']:.1g} nats of "
        f"each sequence alone (at most {result['tolerance']:g}; {result['dtype']}, {weights}, "
        f"{result['layers'] or 'all'} layers, {result['seconds']:.1f} s)",
    )


def _only_other_weights(directory: Path) -> Finding | None:
    """Reports weights of another format; a folder without any is for a run with random ones."""
    if any(directory.glob("*.safetensors")):
        return None
    other = sorted(each.name for kind in _OTHER_WEIGHTS for each in directory.glob(kind))
    if not other:
        return None
    return missing(
        f"no usable weights: {other[0]}, but no model.safetensors and no "
        "model.safetensors.index.json",
        "get the model's safetensors, or load it with transformers and call save_pretrained",
    )


def _run(what: str, module: list[str], directory: Path) -> subprocess.CompletedProcess[str]:
    since = time.monotonic()
    try:
        return subprocess.run(  # noqa: S603 - our own module
            [sys.executable, "-m", *module],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_DEADLINE_S,
            check=False,
            env=python_environment(),
        )
    except subprocess.TimeoutExpired:
        raise WaitTimeout(what, on=str(directory), since=since) from None


def _advice(done: subprocess.CompletedProcess[str]) -> str:
    """Returns how to fix what ended a process: only an import asks for a package."""
    absent = _last_line(done).startswith(("ModuleNotFoundError", "ImportError"))
    return _INSTALL if absent else "see the message"


def _last_line(done: subprocess.CompletedProcess[str]) -> str:
    return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
