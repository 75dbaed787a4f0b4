"""Configuration of one inference server: a frozen dataclass, a YAML mapping, command-line flags."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal.errors import ConfigError
from areal.models.directory import SERVING_DTYPES


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceConfig:
    """Everything one server needs to start.

    Example:
        ``InferenceConfig(model_path="models/tiny", port=30000, max_running_requests=64)``
    """

    model_path: str
    """Folder with config.json, model.safetensors (or shards with an index) and tokenizer.json."""

    host: str = "127.0.0.1"
    """Address to listen on."""

    port: int = 30000
    """Port to listen on; 0 takes a free one, which the ``listening`` log line names."""

    dtype: str = "auto"
    """Type of weights and KV cache: float32, bfloat16, or auto: the checkpoint's."""

    context_length: int | None = None
    """Longest prompt + completion, in tokens; default, and at most, the model's
    max_position_embeddings."""

    max_running_requests: int = 128
    """Most requests decoded together; the others wait in the queue."""

    max_queued_requests: int = 16384
    """Most requests waiting; beyond it /generate answers 503."""

    max_total_tokens: int | None = None
    """KV cache size: rows x longest row, in tokens. Default: what fits in 1 GiB, at most
    max_running_requests x context_length."""

    max_prefill_tokens: int = 4096
    """Most prompt tokens processed between two decode steps (a longer prompt goes alone)."""

    served_model_name: str | None = None
    """Name reported by /model_info; default: model_path."""

    skip_tokenizer_init: bool = False
    """Load no tokenizer: only input_ids are accepted, and responses carry no text."""

    weight_version: str = "default"
    """Version name of the weights loaded at the start."""

    random_seed: int | None = None
    """Seed of the sampler; default: from the operating system, so that servers differ."""

    command_timeout_s: float = 300.0
    """Deadline of a control call (a weight update waits this long for running requests)."""

    token_file: str | None = None
    """File with the bearer token that all but /health and /ready ask for; default: the variable
    AREAL_TOKEN, else no token."""

    allow_insecure_bind: bool = False
    """Listen on an address that other machines reach although there is no token."""

    def __post_init__(self) -> None:
        """Check ranges.

        Raises:
            ConfigError: naming the field, its value and what was expected.
        """
        if self.dtype not in SERVING_DTYPES:
            raise ConfigError(
                f"inference.dtype: {self.dtype!r}, expected one of {list(SERVING_DTYPES)}"
            )
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"inference.port: {self.port}, expected 0..65535")
        for name in (
            "context_length",
            "max_running_requests",
            "max_queued_requests",
            "max_total_tokens",
            "max_prefill_tokens",
            "command_timeout_s",
        ):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"inference.{name}: {value}, expected a positive number")

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> InferenceConfig:
        """Build a config from a mapping such as the ``inference:`` section of a YAML file.

        Raises:
            ConfigError: unknown key (with the nearest name), wrong type, or model_path missing.
        """
        hints = typing.get_type_hints(cls)
        for key, value in values.items():
            if key not in hints:
                near = difflib.get_close_matches(str(key), hints, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ConfigError(f"inference.{key}: unknown key{hint}")
            _check_type(key, value, hints[key])
        if "model_path" not in values:
            raise ConfigError("inference.model_path: missing, expected a model folder")
        return cls(**values)

    @classmethod
    def load(cls, file: Path | None, overrides: Mapping[str, Any]) -> InferenceConfig:
        """Read the ``inference:`` mapping of a YAML file; overrides (set flags) win over it."""
        values: dict[str, Any] = {}
        if file is not None:
            values.update(_read_section(file))
        values.update(overrides)
        return cls.from_mapping(values)


def _check_type(key: str, value: Any, hint: Any) -> None:
    allowed = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if float in allowed and type(value) is int:
        return
    if type(value) not in allowed and not (value is None and types.NoneType in allowed):
        expected = " or ".join("null" if t is types.NoneType else t.__name__ for t in allowed)
        raise ConfigError(
            f"inference.{key}: {value!r} is {type(value).__name__}, expected {expected}"
        )


def _read_section(file: Path) -> Mapping[str, Any]:
    import yaml

    try:
        document = yaml.safe_load(file.read_text())
    except OSError as error:
        raise ConfigError(f"--config {file}: {error.strerror}") from None
    except yaml.YAMLError as error:
        line = " ".join(str(error).split())
        raise ConfigError(f"--config {file}: not valid YAML: {line}") from None
    section = (document or {}).get("inference", {}) if isinstance(document, dict | None) else None
    if not isinstance(section, dict):
        raise ConfigError(f"--config {file}: expected a mapping with an 'inference:' mapping in it")
    return section
