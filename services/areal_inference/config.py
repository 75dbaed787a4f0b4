"""Configuration of one inference server: a YAML mapping and command-line flags set its fields."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from areal.errors import ConfigError, did_you_mean

# By pydantic's error types; only the port has two bounds.
_EXPECTED = {
    "greater_than": "a positive number",
    "greater_than_equal": "0..65535",
    "less_than_equal": "0..65535",
    "literal_error": "one of {expected}",
}


class InferenceConfig(BaseModel):
    """Everything one server needs to start; a field's description is the help of its flag.

    Example:
        ``InferenceConfig(model_path="models/tiny", port=30000, max_running_requests=64)``
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    model_path: str = Field(description="Folder with config.json and safetensors.")
    host: str = Field("127.0.0.1", description="Address to listen on [127.0.0.1].")
    # The `listening` log line names the one that was taken.
    port: int = Field(
        30000, ge=0, le=65535, description="Port to listen on; 0: a free one [30000]."
    )
    # auto: the checkpoint's.
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="float32, bfloat16, or auto: the checkpoint's [auto]."
    )
    # At most the model's max_position_embeddings.
    context_length: int | None = Field(
        None, gt=0, description="Maximum tokens of prompt and completion [the model's]."
    )
    max_running_requests: int = Field(
        128, gt=0, description="Maximum number of requests decoded at once [128]."
    )
    # Beyond it /generate answers 503.
    max_queued_requests: int = Field(
        16384, gt=0, description="Maximum number of waiting requests [16384]."
    )
    # Rows x longest row; by default at most max_running_requests x context_length.
    max_total_tokens: int | None = Field(
        None, gt=0, description="Size of the KV cache in tokens [what fits in 1 GiB]."
    )
    # A longer prompt is prefilled alone.
    max_prefill_tokens: int = Field(
        4096,
        gt=0,
        description="Maximum number of prompt tokens computed between decode steps [4096].",
    )
    served_model_name: str | None = Field(None, description="Name in /model_info [the model path].")
    skip_tokenizer_init: bool = Field(
        False, description="Load no tokenizer: accept and return only token ids."
    )
    weight_version: str = Field(
        "default", description="Version name of the weights at the start [default]."
    )
    enable_lora: bool = Field(False, description="Load adapters: see /load_lora_adapter.")
    max_lora_rank: int = Field(
        256, gt=0, description="Highest rank of an adapter that is loaded [256]."
    )
    # From the operating system by default, so that servers differ.
    random_seed: int | None = Field(None, description="Seed of the sampler [random].")
    # A weight update waits this long for running requests.
    command_timeout_s: float = Field(
        300.0, gt=0, description="Deadline of a control call, in seconds [300]."
    )
    # /health and /ready ask for none.
    token_file: str | None = Field(
        None, description="File with the bearer token that requests need [AREAL_TOKEN]."
    )
    allow_insecure_bind: bool = Field(
        False, description="Without a token, allow other machines to connect."
    )

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> InferenceConfig:
        """Builds a config from a mapping such as the ``inference:`` section of a YAML file.

        Raises:
            ConfigError: Unknown key (with the nearest name), wrong type, value out of range, or
                model_path missing.
        """
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            # A misspelled model_path is missing, too: the spelling is what to tell.
            first = min(error.errors(include_url=False), key=lambda e: e["type"] == "missing")
        key, value, kind = str(first["loc"][0]), first["input"], first["type"]
        if kind == "missing":
            said = "missing, expected a model folder"
        elif key not in cls.model_fields:
            said = f"unknown key{did_you_mean(key, cls.model_fields)}"
        elif expected := _EXPECTED.get(kind):
            said = f"{value!r}, expected {expected.format(**first.get('ctx', {}))}"
        else:
            names = ("null" if t is NoneType else t.__name__ for t in types_of(key))
            said = f"{value!r} is {type(value).__name__}, expected {' or '.join(names)}"
        raise ConfigError(f"inference.{key}: {said}")

    @classmethod
    def load(cls, file: Path | None, overrides: Mapping[str, Any]) -> InferenceConfig:
        """Reads the ``inference:`` mapping of a YAML file; overrides (set flags) win over it."""
        section = {} if file is None else _read_section(file)
        return cls.from_mapping({**section, **overrides})


def types_of(field: str) -> tuple[type, ...]:
    """Returns the type of a field's values, then NoneType if null is allowed."""
    annotation: Any = InferenceConfig.model_fields[field].annotation
    allowed = get_args(annotation) or (annotation,)
    return tuple(each if isinstance(each, type) else type(each) for each in allowed)


def _read_section(file: Path) -> Mapping[str, Any]:
    import yaml

    try:
        document = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {file}: {error.strerror}") from None
    except yaml.YAMLError as error:
        line = " ".join(str(error).split())
        raise ConfigError(f"--config {file}: not valid YAML: {line}") from None
    section = (document or {}).get("inference", {}) if isinstance(document, dict | None) else None
    if not isinstance(section, dict):
        raise ConfigError(f"--config {file}: expected a mapping with an 'inference:' mapping in it")
    return section
