"""Command line of the server: flags over a YAML file over defaults."""

from __future__ import annotations

import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Annotated, Any

import typer
import uvloop

from areal.chassis import tracing
from areal.chassis.logging import configure_logging
from areal.errors import ArealError
from areal_inference.config import InferenceConfig


def command_line(serve: Callable[[InferenceConfig], Coroutine[Any, Any, int]]) -> None:
    """Reads flags and YAML, runs `serve` in an event loop and exits with its code."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(name="areal-inference")(run)
    app(prog_name="areal-inference", obj=serve)


def run(
    context: typer.Context,
    config: Annotated[
        Path | None, typer.Option(help="YAML file with an 'inference:' mapping; flags win.")
    ] = None,
    model_path: Annotated[
        str | None, typer.Option(help="Folder with config.json and safetensors.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on [127.0.0.1].")] = None,
    port: Annotated[int | None, typer.Option(help="Port; 0 takes a free one [30000].")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or auto [auto].")] = None,
    context_length: Annotated[
        int | None, typer.Option(help="Longest prompt + completion, tokens [the model's].")
    ] = None,
    max_running_requests: Annotated[
        int | None, typer.Option(help="Most requests decoded together [128].")
    ] = None,
    max_queued_requests: Annotated[
        int | None, typer.Option(help="Most requests waiting [16384].")
    ] = None,
    max_total_tokens: Annotated[
        int | None, typer.Option(help="Size of the KV cache, tokens [what fits in 1 GiB].")
    ] = None,
    max_prefill_tokens: Annotated[
        int | None, typer.Option(help="Most prompt tokens between two decode steps [4096].")
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="Name in /model_info [the model path].")
    ] = None,
    skip_tokenizer_init: Annotated[
        bool | None, typer.Option("--skip-tokenizer-init", help="Token ids only, no text.")
    ] = None,
    weight_version: Annotated[
        str | None, typer.Option(help="Version name of the initial weights [default].")
    ] = None,
    random_seed: Annotated[int | None, typer.Option(help="Seed of the sampler [random].")] = None,
    command_timeout_s: Annotated[
        float | None, typer.Option(help="Deadline of a control call, seconds [300].")
    ] = None,
    token_file: Annotated[
        str | None, typer.Option(help="File with the bearer token to ask for [AREAL_TOKEN].")
    ] = None,
    allow_insecure_bind: Annotated[
        bool | None,
        typer.Option("--allow-insecure-bind", help="Let other machines in without a token."),
    ] = None,
    log_text: Annotated[bool, typer.Option("--log-text", help="Plain lines, not JSON.")] = False,
) -> None:
    """Serve a Qwen2 or Llama model on CPU with SGLang's HTTP protocol."""
    flags: dict[str, Any] = {
        k: v
        for k, v in locals().items()
        if k not in ("context", "config", "log_text") and v is not None
    }
    try:
        settings = InferenceConfig.load(config, flags)
        configure_logging("inference", settings.served_model_name or "", text=log_text)
        with tracing.exporting("areal-inference", settings.served_model_name or ""):
            code = uvloop.run(context.obj(settings))
    except ArealError as error:
        sys.stderr.write(f"areal-inference: {error}\n")
        code = 2
    raise typer.Exit(code)
