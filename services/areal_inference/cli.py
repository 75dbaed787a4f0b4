"""Command line of the server: flags over a YAML file over defaults."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import uvloop

from areal.chassis import tracing
from areal.chassis.logging import configure_logging
from areal.errors import ArealError
from areal_inference.config import InferenceConfig, types_of


def command_line(serve: Callable[[InferenceConfig], Coroutine[Any, Any, int]]) -> None:
    """Reads flags and YAML, runs `serve` in an event loop and exits with its code."""
    flags = vars(_parser().parse_args())
    file, log_text = flags.pop("config", None), flags.pop("log_text", False)
    try:
        config = InferenceConfig.load(file, flags)
        configure_logging("inference", config.served_model_name or "", text=log_text)
        with tracing.exporting("areal-inference", config.served_model_name or ""):
            code = uvloop.run(serve(config))
    except ArealError as error:
        sys.stderr.write(f"areal-inference: {error}\n")
        code = 2
    except ImportError as error:
        # Starting again would say the same.
        sys.stderr.write(
            f"areal-inference: {type(error).__name__}: {error}; "
            "pip install 'areal-services[inference]'\n"
        )
        code = 2
    sys.exit(code)


def _parser() -> argparse.ArgumentParser:
    """A flag per field of the configuration; one that is not given leaves no trace."""
    parser = argparse.ArgumentParser(
        prog="areal-inference",
        description="Serve a Llama, Qwen2, Qwen2-VL or Qwen2.5-VL model on a CPU through SGLang's "
        "HTTP protocol.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config", type=Path, help="YAML file with an 'inference:' section; flags take precedence."
    )
    for name, field in InferenceConfig.model_fields.items():
        flag, kind = f"--{name.replace('_', '-')}", types_of(name)[0]
        if kind is bool:
            parser.add_argument(flag, action="store_true", help=field.description)
        else:
            parser.add_argument(flag, type=kind, help=field.description)
    parser.add_argument(
        "--log-text", action="store_true", help="Write plain log lines instead of JSON."
    )
    return parser
