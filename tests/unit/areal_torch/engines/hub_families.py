"""Tiny models of many families, as their directories on the Hub name the tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

_COMMON = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
_EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
}
_GROUPS = {"n_group": 2, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
IMAGE = 90
"""The token that stand for images, of those with a vision tower."""
_VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 4,
    "patch_size": 4,
    "out_hidden_size": 32,
}
VISION_START = 92
_SEEING = {
    "image_token_id": IMAGE,
    "vision_start_token_id": VISION_START,
    "video_token_id": 91,
    "tie_word_embeddings": False,
}
_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}


def _text(**options: Any) -> dict[str, Any]:
    return {"text_config": {**_COMMON, "rope_parameters": _ROPE, **options}}


SEEING: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {
        **(_text() | _SEEING),
        "vision_config": {**_VISION, "window_size": 16, "fullatt_block_indexes": [1]},
    },
    "qwen2_vl": {
        **(_text() | _SEEING),
        "vision_config": {
            **{name: _VISION[name] for name in ("depth", "num_heads", "patch_size")},
            "embed_dim": 32,
            "hidden_size": 32,
            "mlp_ratio": 2,
        },
    },
    "qwen3_vl": {
        **(_text() | _SEEING),
        "vision_config": {
            **_VISION,
            "deepstack_visual_indexes": [0],
            "num_position_embeddings": 16,
        },
    },
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"tie_word_embeddings": False},
    "llama": {"tie_word_embeddings": False},
    "mistral": {},
    "gemma3_text": {"tie_word_embeddings": True},
    "phi3": {},
    "gpt_neox": {"tie_word_embeddings": False},
    "qwen2_moe": _EXPERTS,
    "qwen3_moe": _EXPERTS,
    "mixtral": _EXPERTS,
    "olmoe": _EXPERTS,
    "glm4_moe": {**_EXPERTS, **_GROUPS},
    "deepseek_v3": {**_EXPERTS, **_GROUPS, **_LATENT},
    "gpt_oss": _EXPERTS,
    **SEEING,
}


def make_family(kind: str, folder: Path, *, seed: int = 0, **options: Any) -> Path:
    """Write a random model with `save_pretrained`; norms, biases and buffers count in it too."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    torch.set_num_threads(1)
    common = {} if kind in SEEING else _COMMON
    config = AutoConfig.for_model(kind, **{**common, **FAMILIES[kind], **options})
    auto: Any = AutoModelForImageTextToText if kind in SEEING else AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = auto.from_config(config, dtype=torch.float32)
        scatter(model)
    model.save_pretrained(folder)
    return folder


@torch.no_grad()
def scatter(model: Any) -> None:
    """Move every weight and every saved buffer a little, each differently."""
    for tensor in {id(t): t for t in model.state_dict(keep_vars=True).values()}.values():
        shard = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        shard.add_(torch.randn_like(shard), alpha=0.05)
