"""A tiny random model of each architecture that transformers knows as a causal language model."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

import torch

# What makes a configuration tiny and its special features show; names it lacks are left out.
_WIDTHS: dict[str, int] = {
    "vocab_size": 96,
    "vocab_size_per_layer_input": 96,
    "hidden_size": 32,
    "hidden_size_per_layer_input": 8,
    "n_embd": 32,
    "d_model": 32,
    "embedding_size": 32,
    "intermediate_size": 48,
    "intermediate_size_mlp": 48,
    "ffn_dim": 48,
    "dim_ff": 48,
    "dff": 48,
    "n_inner": 48,
    "ffn_hidden_size": 48,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "moe_intermediate_size": 24,
    "expert_ffn_hidden_size": 24,
    "shared_expert_intermediate_size": 24,
    "shared_experts_intermediate_size": 24,
    "dense_intermediate_size": 48,
    "head_dim": 8,
    "dim_head": 8,
    "rotary_dim": 4,
    "max_position_embeddings": 128,
    "n_positions": 128,
    "seq_length": 128,
    "max_seq_len": 128,
    "sliding_window": 7,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
}
_TINY: dict[str, Any] = {
    "num_hidden_layers": 4,
    "n_layer": 4,
    "n_layers": 4,
    "num_layers": 4,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "attention_chunk_size": 4,
    "floor_scale": 3,
    "index_topk": 3,
    "index_topk_blocks": 2,
    "index_block_size": 4,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "zero_expert_num": 1,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "top_k_experts": 2,
    "moe_k": 2,
    "n_group": 1,
    "topk_group": 1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "logit_scale": 1.7,
    "logits_scaling": 1.7,
    "final_logit_softcapping": 3.0,
    "attn_logit_softcapping": 3.0,
    "router_jitter_noise": 0.2,
    "input_jitter_noise": 0.2,
}
_TINY_TOWER = {
    "depth": 2,
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "embed_dim": 32,
    "intermediate_size": 48,
    "num_heads": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "patch_size": 4,
    "image_size": 16,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
    "position_embedding_size": 16,
    "deepstack_visual_indexes": [0],
    "fullatt_block_indexes": [1],
    "vision_output_dim": 32,
    "projector_input_dim": 32,
    "projector_output_dim": 32,
    "mm_embed_dim": 32,
    "mm_posemb_size": 16,
    "output_proj_dims": 32,
}
_SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
# Checkpoints of several models whose text model is trained; what their parts need besides.
COMPOSITE: dict[str, dict[str, Any]] = {
    "gemma3": {"text_config": {"final_logit_softcapping": None}},  # as it is published
    "gemma4": {},
    "gemma4_unified": {},
    "glm4v": {"text_config": {"rope_parameters": _SECTIONS}},
    "llama4": {},
    "mistral3": {},
    "qwen2_5_vl": {"text_config": {"rope_parameters": _SECTIONS}},
    "qwen2_vl": {"text_config": {"rope_parameters": _SECTIONS}},
    "qwen3_5": {},
    "qwen3_5_moe": {},
    "qwen3_vl": {},
}
# Latent attention has as many key heads as heads.
_LATENT = {"num_key_value_heads": 4}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8}
_ZAMBA = ["linear_attention", "hybrid"] * 2
_HYBRID = ["linear_attention", "full_attention"] * 2
_SPECIAL: dict[str, dict[str, Any]] = {
    "bamba": {**_MAMBA, "attn_layer_indices": [1, 3]},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 64},
    "gemma3n_text": {
        "num_kv_shared_layers": 2,
        "laurel_rank": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
    },
    "gemma4_text": {"num_experts": None, "top_k_experts": None, "moe_intermediate_size": None},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 7},
    "granitemoehybrid": {**_MAMBA, "layer_types": _HYBRID},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"linear_head_dim": 8, "linear_num_heads": 4},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}
    },
    "diffllama": {"attention_dropout": 0.0},
    "dots1": {"n_shared_experts": 1},
    "llama4_text": {"no_rope_layers": [1, 0, 1, 0], "moe_layers": [1, 2]},
    "mamba2": {"num_heads": 8, "state_size": 8, "n_groups": 1},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2},
    "phimoe": {"sliding_window": None},  # as it is published
    "prophetnet": {
        "num_encoder_layers": 2,
        "num_decoder_layers": 2,
        "num_encoder_attention_heads": 4,
        "num_decoder_attention_heads": 4,
    },
    "reformer": {"is_decoder": True},
    "roc_bert": {"shape_vocab_size": 96, "pronunciation_vocab_size": 96},
    "youtu": {"pad_token_id": None},  # transformers clears its row when it loads
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": _ZAMBA, "n_mamba_heads": 2},
    "zamba2": {"layers_block_type": _ZAMBA, "mamba_d_state": 8},
    "zaya": {"num_experts_per_tok": 1},
}
_WITHOUT: dict[str, set[str]] = {
    "falcon": {"head_dim"},
    "prophetnet": {"num_hidden_layers"},
    "xlnet": {"max_position_embeddings"},
    "xlstm": {"head_dim", "v_head_dim", "qk_head_dim"},
}
LARGEST = 10_000_000
"""Parameters of a model that still counts as tiny."""


class NotTried(Exception):
    """There is no tiny model of this architecture; says why in one line."""


def tiny_config(model_type: str, wider: int = 1, changes: Mapping[str, Any] | None = None) -> Any:
    """Returns the configuration of a tiny model.

    Args:
        model_type: The architecture, as config.json has it.
        wider: Factor of its widths and lengths (1: hidden size 32), for text models alone.
        changes: For a checkpoint of several models: fields that differ. Those of its parts
            (`text_config`, `vision_config`) are mappings under the part's name.

    Raises:
        NotTried: It is made of several models.
    """
    from transformers import CONFIG_MAPPING

    default = CONFIG_MAPPING[model_type]()
    text = default.get_text_config()
    if text is not default:
        if model_type not in COMPOSITE or wider > 1:
            raise NotTried(f"several models in one; its text model is `{text.model_type}`")
        changes = dict(changes or {})
        parts = {
            name: _tiny_tower(kind) | COMPOSITE[model_type].get(name, {}) | changes.pop(name, {})
            for name, kind in _towers(default)
        }
        tokens = {name: 90 + number for number, name in enumerate(_placeholders(default))}
        chosen = _tiny_text(text) | COMPOSITE[model_type].get("text_config", {})
        chosen |= changes.pop("text_config", {})
        return type(default)(text_config=chosen, **parts, **tokens, **changes)
    return type(text)(**_tiny_text(text, wider))


def _towers(default: Any) -> Iterator[tuple[str, type]]:
    for name, kind in default.sub_configs.items():
        given = getattr(default, name, None)
        if name != "text_config":
            yield name, kind if given is None else type(given)


def _placeholders(default: Any) -> list[str]:
    return [
        field.name
        for field in fields(type(default))
        if field.name.endswith(("_token_id", "_token_index"))
        and field.name.startswith(("image", "video", "audio", "vision", "boi", "eoi"))
    ]


def _tiny_tower(kind: type) -> dict[str, Any]:
    """What makes the configuration of a tower for images or sounds tiny."""
    known = {field.name for field in fields(kind)}
    return {name: value for name, value in _TINY_TOWER.items() if name in known}


def _tiny_text(text: Any, wider: int = 1) -> dict[str, Any]:
    """What makes the configuration of a text model tiny."""
    kind = type(text)
    known = {field.name for field in fields(kind)}
    wide = {name: value * wider for name, value in _WIDTHS.items()}
    chosen = {name: value for name, value in (wide | _TINY).items() if name in known}
    if "kv_lora_rank" in known:
        chosen |= _LATENT
    # Every kind of layer that the real pattern has.
    for name in ("layer_types", "mlp_layer_types", "layers_block_type"):
        pattern = getattr(text, name, None)
        if pattern and name in known:
            kinds = list(dict.fromkeys(pattern))
            chosen[name] = [*(kinds * 4)[:3], pattern[-1]]
    chosen |= {
        name: 0.2 for name in known if "drop" in name and isinstance(getattr(text, name), float)
    }
    chosen |= _SPECIAL.get(text.model_type, {})
    for name in _WITHOUT.get(text.model_type, ()):
        chosen.pop(name, None)
    return chosen


def tiny_model(
    model_type: str,
    seed: int,
    wider: int = 1,
    changes: Mapping[str, Any] | None = None,
) -> Any:
    """Returns a tiny model with weights large enough for errors to show, eager and in eval().

    Args:
        model_type: The architecture.
        seed: Of the weights.
        wider: See `tiny_config`.
        changes: See `tiny_config`.

    Raises:
        NotTried: It cannot be made tiny.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    composite = model_type in COMPOSITE
    auto: Any = AutoModelForImageTextToText if composite else AutoModelForCausalLM
    try:
        config = tiny_config(model_type, wider, changes)
        with torch.device("meta"):
            empty = auto.from_config(config)
        size = sum(parameter.numel() for parameter in empty.parameters())
    except NotTried:
        raise
    except Exception as error:
        said = textwrap.shorten(str(error), 120, placeholder=" …")
        raise NotTried(f"{type(error).__name__}: {said}") from error
    if size > LARGEST:
        raise NotTried(f"{size / 1e6:.0f} M parameters at its smallest")
    torch.manual_seed(seed)
    hf = auto.from_config(config, attn_implementation="eager")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in hf.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim >= 2:
                parameter.copy_(noise * (1.5 / parameter.shape[-1] ** 0.5))
            else:
                parameter.add_(noise * 0.2)
    return hf.eval()
