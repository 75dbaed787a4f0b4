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
}


def make_family(kind: str, folder: Path, *, seed: int = 0, **options: Any) -> Path:
    """Write a random model with `save_pretrained`; norms, biases and buffers count in it too."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.set_num_threads(1)
    config = AutoConfig.for_model(kind, **{**_COMMON, **FAMILIES[kind], **options})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        scatter(model)
    model.save_pretrained(folder)
    return folder


@torch.no_grad()
def scatter(model: Any) -> None:
    """Move every weight and every saved buffer a little, each differently."""
    for tensor in {id(t): t for t in model.state_dict(keep_vars=True).values()}.values():
        shard = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        shard.add_(torch.randn_like(shard), alpha=0.05)
