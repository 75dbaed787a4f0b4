"""What this engine needs to know of a model: read from the folder's config.json. No torch here."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal.errors import InvalidInput
from areal.model_directory import rope_of

SEEING = ("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration")
"""Model types with a vision tower beside a Qwen2 decoder."""
ARCHITECTURES = ("Qwen2ForCausalLM", "LlamaForCausalLM", *SEEING)


class ModelError(InvalidInput):
    """The model folder is missing, broken or of a kind this engine cannot run. One line."""


class UnknownModel(ModelError):
    """The fast decoder does not know the architecture, or one of its options."""


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
    """Number of patches, in height and in width, that form one token."""
    sections: tuple[int, ...]
    """Rotary frequencies that turn by time, by height and by width."""
    settings: dict[str, Any]
    """The tower's settings, as in config.json."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What the server needs to know of any model."""

    architecture: str
    model_type: str
    vocab_size: int
    max_position_embeddings: int
    eos_token_ids: frozenset[int]
    vision: VisionConfig | None = None
    """The vision tower; None: images are not accepted."""

    @property
    def cache_values(self) -> int:
        """Returns how many numbers the cache keeps for a token."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(ServedModel):
    """Shape of a Qwen2 or Llama decoder, and what it sees with.

    Example:
        hidden_size=128, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=32, vocab_size=261
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Llama3Rope | None
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool

    @property
    def cache_values(self) -> int:
        """Returns how many numbers the cache keeps for a token."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    @classmethod
    def from_folder(cls, folder: Path) -> ModelConfig:
        """Reads config.json (and the end-of-sequence ids of generation_config.json).

        Raises:
            UnknownModel: Unknown architecture, unsupported option.
            ModelError: Folder or file missing, or not a model's.
        """
        if not folder.is_dir():
            raise ModelError(f"model path {folder}: no such folder")
        try:
            return cls._read(folder)
        except ModelError:
            raise
        # A folder is a stranger's: any value may be of any kind.
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            text = f"{type(error).__name__}: {error}"
            raise ModelError(f"{folder / 'config.json'}: not a model's config: {text}") from None

    @classmethod
    def _read(cls, folder: Path) -> ModelConfig:
        raw = read_json(folder / "config.json")
        return cls._from_raw(folder, raw, eos_ids(folder, raw))

    @classmethod
    def _from_raw(cls, folder: Path, raw: dict[str, Any], eos: frozenset[int]) -> ModelConfig:
        architecture = (raw.get("architectures") or ["?"])[0]
        if not isinstance(architecture, str):
            raise TypeError(f"architectures[0]: {architecture!r:.50}, expected a name")
        if architecture not in ARCHITECTURES:
            raise UnknownModel(
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
            for key, most in _MOST.items():
                if key in _OPTIONAL and not raw.get(key):
                    continue
                if not 1 <= int(raw[key]) <= most:
                    shown = f"{key} {raw[key]}: expected 1 to {most}"
                    raise ModelError(f"{folder / 'config.json'}: {shown}")
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


# More than any model has, and little enough to be counted to.
_MOST = {
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 22,
    "num_hidden_layers": 10_000,
    "num_attention_heads": 1 << 16,
    "vocab_size": 1 << 24,
    "max_position_embeddings": 1 << 31,
    "num_key_value_heads": 1 << 16,
    "head_dim": 1 << 16,
}
_OPTIONAL = ("num_key_value_heads", "head_dim")


def _tied(raw: dict[str, Any]) -> dict[str, Any]:
    """The word of the whole model counts, not that of its decoder's section."""
    key = "tie_word_embeddings"
    return {key: raw[key]} if key in raw else {}


def _vision(folder: Path, raw: dict[str, Any]) -> VisionConfig:
    rope = _rope_values(folder, raw)
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


def eos_ids(folder: Path, raw: dict[str, Any]) -> frozenset[int]:
    """Returns the tokens that end an answer, by a folder's config.json and generation_config.json.

    Raises:
        ModelError: generation_config.json is broken.
    """
    found = _ids(raw.get("eos_token_id")) | _ids(raw.get("text_config", {}).get("eos_token_id"))
    generation = folder / "generation_config.json"
    if generation.is_file():
        found |= _ids(read_json(generation).get("eos_token_id"))
    return found


def read_json(file: Path) -> dict[str, Any]:
    """Returns a file's JSON object; raises ModelError."""
    if file.exists() and not file.is_file():  # a FIFO would be waited for
        raise ModelError(f"{file}: expected a file")
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{file}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
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
    refuse_quantized(folder, raw)
    for key, allowed in (
        ("hidden_act", ("silu", None)),
        ("mlp_bias", (False, None)),
        ("use_sliding_window", (False, None)),
        ("partial_rotary_factor", (1.0, None)),
    ):
        if raw.get(key) not in allowed:
            raise UnknownModel(f"{folder / 'config.json'}: {key}={raw[key]!r} is not supported")


def refuse_quantized(folder: Path, raw: dict[str, Any]) -> None:
    """Refuses weights that are not plain numbers; raises ModelError."""
    key = "quantization_config"
    if raw.get(key) is not None:
        raise ModelError(f"{folder / 'config.json'}: {key}={raw[key]!r:.100} is not supported")


def _rope_values(folder: Path, raw: dict[str, Any]) -> dict[str, Any]:
    try:
        return rope_of(raw) or {}
    except InvalidInput as error:
        raise ModelError(f"{folder / 'config.json'}: {error}") from None


def _rope(folder: Path, raw: dict[str, Any]) -> tuple[float, Llama3Rope | None]:
    """Reads ``rope_parameters`` (transformers 5), or ``rope_theta`` and ``rope_scaling``."""
    values = _rope_values(folder, raw)
    theta = float(values.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    kind = values.get("rope_type") or values.get("type") or "default"
    if kind == "default" or (kind == "mrope" and "mrope_section" in values):
        return theta, None
    if kind != "llama3":
        raise UnknownModel(
            f"{folder / 'config.json'}: rope_type={kind!r} is not supported, "
            "expected 'default' or 'llama3'"
        )
    return theta, Llama3Rope(
        factor=float(values["factor"]),
        low_freq_factor=float(values["low_freq_factor"]),
        high_freq_factor=float(values["high_freq_factor"]),
        original_max_position_embeddings=int(values["original_max_position_embeddings"]),
    )
