"""What this engine needs to know of a model: read from the folder's config.json. No torch here."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal.errors import InvalidInput

SEEING = ("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration")
"""A vision tower beside a Qwen2 decoder."""
ARCHITECTURES = ("Qwen2ForCausalLM", "LlamaForCausalLM", *SEEING)


class ModelError(InvalidInput):
    """The model folder is missing, broken or of a kind this engine cannot run. One line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Rope:
    """Frequency rescaling of Llama 3.1 (transformers' rope_type "llama3")."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """What a model that sees has beside its decoder."""

    image_token_id: int
    merge: int
    """So many patches in height, and in width, make one token."""
    sections: tuple[int, ...]
    """Rotary frequencies that turn by time, by height and by width."""
    settings: dict[str, Any]
    """Of the tower, as in config.json."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape of a Qwen2 or Llama decoder, and what it sees with.

    Example:
        hidden_size=128, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=32, vocab_size=261
    """

    architecture: str
    model_type: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Llama3Rope | None
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    eos_token_ids: frozenset[int]
    vision: VisionConfig | None = None

    @classmethod
    def from_folder(cls, folder: Path) -> ModelConfig:
        """Read config.json (and the end-of-sequence ids of generation_config.json).

        Raises:
            ModelError: folder or file missing, unknown architecture, unsupported option.
        """
        if not folder.is_dir():
            raise ModelError(f"model path {folder}: no such folder")
        raw = _read_json(folder / "config.json")
        generation = folder / "generation_config.json"
        eos = _ids(raw.get("eos_token_id")) | _ids(raw.get("text_config", {}).get("eos_token_id"))
        if generation.is_file():
            eos |= _ids(_read_json(generation).get("eos_token_id"))
        return cls._from_raw(folder, raw, eos)

    @classmethod
    def _from_raw(cls, folder: Path, raw: dict[str, Any], eos: frozenset[int]) -> ModelConfig:
        architecture = (raw.get("architectures") or ["?"])[0]
        if architecture not in ARCHITECTURES:
            raise ModelError(
                f"model path {folder}: architecture {architecture}, expected one of "
                f"{', '.join(ARCHITECTURES)}"
            )
        qwen2 = architecture != "LlamaForCausalLM"
        vision, model_type = None, str(raw.get("model_type", ""))
        if architecture in SEEING:  # its decoder is described beside it, or in a section
            raw = {**raw, **raw.get("text_config", {}), **_tied(raw)}
            vision = _vision(folder, raw)
        _refuse_unsupported(folder, raw)
        try:
            heads = int(raw["num_attention_heads"])
            theta, scaling = _rope(folder, raw)
            return cls(
                architecture=architecture,
                model_type=model_type,
                hidden_size=int(raw["hidden_size"]),
                intermediate_size=int(raw["intermediate_size"]),
                num_layers=int(raw["num_hidden_layers"]),
                num_heads=heads,
                num_kv_heads=int(raw.get("num_key_value_heads") or heads),
                head_dim=int(raw.get("head_dim") or int(raw["hidden_size"]) // heads),
                vocab_size=int(raw["vocab_size"]),
                max_position_embeddings=int(raw["max_position_embeddings"]),
                rms_norm_eps=float(raw["rms_norm_eps"]),
                rope_theta=theta,
                rope_scaling=scaling,
                # Both families default to false in transformers when the key is absent.
                tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
                qkv_bias=qwen2 or bool(raw.get("attention_bias")),
                o_bias=not qwen2 and bool(raw.get("attention_bias")),
                eos_token_ids=eos,
                vision=vision,
            )
        except KeyError as error:
            raise ModelError(f"{folder / 'config.json'}: missing key {error}") from None


def _tied(raw: dict[str, Any]) -> dict[str, Any]:
    """The word of the whole model counts, not that of its decoder's section."""
    key = "tie_word_embeddings"
    return {key: raw[key]} if key in raw else {}


def _vision(folder: Path, raw: dict[str, Any]) -> VisionConfig:
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    try:
        settings = dict(raw["vision_config"])
        return VisionConfig(
            image_token_id=int(raw["image_token_id"]),
            merge=int(settings.get("spatial_merge_size", 2)),
            sections=tuple(int(size) for size in rope["mrope_section"]),
            settings=settings,
        )
    except KeyError as error:
        raise ModelError(f"{folder / 'config.json'}: missing key {error}") from None


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{file}: {error.strerror}") from None
    except ValueError as error:
        raise ModelError(f"{file}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{file}: expected a JSON object")
    return value


def _ids(value: Any) -> frozenset[int]:
    if value is None:
        return frozenset()
    return frozenset(value if isinstance(value, list) else [value])


def _refuse_unsupported(folder: Path, raw: dict[str, Any]) -> None:
    """Options that would silently change the result if they were ignored."""
    for key, allowed in (
        ("hidden_act", ("silu", None)),
        ("mlp_bias", (False, None)),
        ("use_sliding_window", (False, None)),
        ("quantization_config", (None,)),
        ("partial_rotary_factor", (1.0, None)),
    ):
        if raw.get(key) not in allowed:
            raise ModelError(f"{folder / 'config.json'}: {key}={raw[key]!r} is not supported")


def _rope(folder: Path, raw: dict[str, Any]) -> tuple[float, Llama3Rope | None]:
    """Both spellings: ``rope_parameters`` (transformers 5), ``rope_theta`` + ``rope_scaling``."""
    values = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = float(values.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    kind = values.get("rope_type") or values.get("type") or "default"
    if kind == "default" or (kind == "mrope" and "mrope_section" in values):
        return theta, None
    if kind != "llama3":
        raise ModelError(
            f"{folder / 'config.json'}: rope_type={kind!r} is not supported, "
            "expected 'default' or 'llama3'"
        )
    return theta, Llama3Rope(
        factor=float(values["factor"]),
        low_freq_factor=float(values["low_freq_factor"]),
        high_freq_factor=float(values["high_freq_factor"]),
        original_max_position_embeddings=int(values["original_max_position_embeddings"]),
    )
