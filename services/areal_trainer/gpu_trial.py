"""A minute on the GPUs, for `areal doctor --gpu`: does what a run will do first, in miniature.

    python -m areal_trainer.gpu_trial step [FOLDER]   one train step on eight tokens
    torchrun … -m areal_trainer.gpu_trial pair        a collective between ranks

Prints one line of JSON. On a machine without GPUs it computes on CPUs.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import typer

from areal.errors import ArealError, InvalidInput
from areal.model_directory import read_config

_PAIR_S = 45.0
_VOCABULARY = 256

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def step(
    model: Annotated[
        Path | None, typer.Argument(help="A folder with the model's config.json.")
    ] = None,
) -> None:
    """Take a train step on eight tokens with one layer of the model, or with a tiny model."""
    _report(lambda: train_step(model))


@app.command()
def pair() -> None:
    """Sum a tensor over the ranks."""
    _report(sum_over_ranks)


def train_step(model: Path | None) -> dict[str, Any]:
    """Builds the engine as a trainer does, with random weights, and trains it for a step.

    Args:
        model: A folder with config.json; None: a tiny model.
    """
    from areal.config.training import TrainEngineConfig
    from areal_torch.engines.parallel.apply import resolve_precision
    from areal_torch.engines.sft import FSDPLMEngine, pack_examples
    from areal_torch.models.tiny import make_tiny_model

    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="areal-gpu-trial-") as name:
        folder = Path(name)
        if model is None:
            make_tiny_model(folder)
        else:
            (folder / "config.json").write_text(json.dumps(one_layer(read_config(model))), "utf-8")
        engine = FSDPLMEngine(TrainEngineConfig(path=name, init_from_scratch=True))
        try:
            engine.initialize(total_train_steps=1)
            stats = engine.train_lm(pack_examples([([1, 2], [3, 4]), ([1, 5], [6, 7])]))
            return {
                "device": str(engine.device),
                "kernel": engine.model.kernel,
                "dtype": str(resolve_precision(engine.config, engine.device)[0]).partition(".")[2],
                "loss": stats["loss"],
                "seconds": round(time.monotonic() - began, 1),
            }
        finally:
            engine.destroy()


def one_layer(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the configuration of a model with one decoder layer of the same sizes.

    A text model also gets a small vocabulary, because its embedding would take most of the time.
    """
    whole = dict(config)
    parts = whole.get("text_config")
    text = dict(parts) if isinstance(parts, dict) else whole
    text["num_hidden_layers"] = 1
    if text.get("layer_types"):
        text["layer_types"] = text["layer_types"][:1]
    if text is whole:
        text["vocab_size"] = min(int(text.get("vocab_size") or _VOCABULARY), _VOCABULARY)
        for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
            text.pop(key, None)
    else:
        whole["text_config"] = text
    return whole


def sum_over_ranks() -> dict[str, Any]:
    """Joins torchrun's group on this rank's GPU and sums 4 MiB over the ranks.

    Raises:
        InvalidInput: The sum is wrong.
    """
    import torch
    import torch.distributed as dist

    from areal_torch.engines.parallel.mesh import local_device

    device = local_device()
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(seconds=_PAIR_S))
    try:
        rank, world = dist.get_rank(), dist.get_world_size()
        tensor = torch.full((1 << 20,), float(rank + 1), device=device)
        dist.all_reduce(tensor)
        expected = world * (world + 1) / 2
        if not bool((tensor == expected).all()):
            raise InvalidInput(f"the sum over {world} ranks is {tensor[0].item()}, not {expected}")
        nccl: Any = torch.cuda.nccl  # has no types
        version = ".".join(map(str, nccl.version())) if cuda else ""
        return {"device": str(device), "ranks": world, "nccl": version}
    finally:
        dist.destroy_process_group()


def _report(work: Any) -> None:
    try:
        answer = work()
    except ArealError as error:
        answer = {"refused": str(error)}
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(answer), flush=True)  # noqa: T201 - for the doctor


if __name__ == "__main__":
    app()
