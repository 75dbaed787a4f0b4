"""A tiny model that really learns on a CPU, with a byte-level tokenizer; a Qwen2 by default.

Hidden 128, 3 layers, 4 heads (2 for keys and values), intermediate 384, tied embeddings: 0.62 M
parameters, saved as a Hugging Face directory. The tokenizer has 261 tokens: id b is byte b, then
`<|pad|>`, `<|system|>`, `<|user|>`, `<|assistant|>`, `<|end|>`. A chat turn costs one token
for its role, its bytes, and `<|end|>` after the assistant's.

Example:
    >>> make_tiny_model("runs/tiny", seed=0)
    >>> tokenizer = Tokenizer.from_file("runs/tiny/tokenizer.json")
    >>> tokenizer.encode("<|user|>7+8=<|assistant|>").ids
    [258, 55, 43, 56, 61, 259]
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from areal.chassis.collector import collector_paused
from areal.errors import InvalidInput

PAD_TOKEN, SYSTEM_TOKEN, USER_TOKEN = "<|pad|>", "<|system|>", "<|user|>"
ASSISTANT_TOKEN, END_TOKEN = "<|assistant|>", "<|end|>"
SPECIAL_TOKENS = (PAD_TOKEN, SYSTEM_TOKEN, USER_TOKEN, ASSISTANT_TOKEN, END_TOKEN)
PAD_ID, SYSTEM_ID, USER_ID, ASSISTANT_ID, END_ID = range(256, 261)
VOCAB_SIZE = 261
IMAGE_TOKEN, VIDEO_TOKEN = "<|image|>", "<|video|>"
IMAGE_ID, VIDEO_ID = 261, 262
"""Token ids of the model that reads images."""
ARCHITECTURES = ("qwen2", "qwen3_moe", "qwen3_5")
"""Architectures that `make_tiny_model` can create: a dense decoder; a mixture of 8 experts, 2 per
token; and a checkpoint of several models, whose every second layer is a gated delta rule and whose
vision tower is not used for text."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '<|end|>' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


_SEEING_TEMPLATE = CHAT_TEMPLATE.replace(
    "{{ '<|' + message['role'] + '|>' + message['content'] }}",
    "{{ '<|' + message['role'] + '|>' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{{ '<|image|>' if part['type'] == 'image' else part['text'] }}"
    "{% endfor %}{% endif %}",
)


def _byte_characters() -> list[str]:
    """Returns the character that byte-level tokenizers use for each byte (GPT-2's table)."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    characters, extra = [], 0
    for byte in range(256):
        if byte in printable:
            characters.append(chr(byte))
        else:
            characters.append(chr(256 + extra))
            extra += 1
    return characters


def make_byte_tokenizer(more: tuple[str, ...] = (), texts: tuple[str, ...] = ()) -> Any:
    """Makes the 261-token `tokenizers.Tokenizer`; needs no torch.

    Args:
        more: More special tokens.
        texts: Texts that are one token each, after all others, and no special tokens.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

    vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    # Like transformers' Qwen2Tokenizer, which AutoTokenizer creates from this directory.
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in (*SPECIAL_TOKENS, *more)]
    )
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in texts])
    return tokenizer


def save_tokenizer(
    directory: str | Path, *, sees: bool = False, texts: tuple[str, ...] = ()
) -> None:
    """Writes tokenizer.json and tokenizer_config.json (with the chat template); needs no torch.

    Args:
        directory: Created if missing.
        sees: Add the tokens for images and videos.
        texts: Texts that are one token each.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    more = (IMAGE_TOKEN, VIDEO_TOKEN) if sees else ()
    make_byte_tokenizer(more, texts).save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "eos_token": END_TOKEN,
        "pad_token": PAD_TOKEN,
        # Never produced; named so that transformers' Qwen2Tokenizer does not add a token of its
        # own.
        "unk_token": END_TOKEN,
        "model_max_length": 2048,
        "clean_up_tokenization_spaces": False,
        "chat_template": _SEEING_TEMPLATE if sees else CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")


def make_tiny_model(
    directory: str | Path,
    *,
    architecture: str = "qwen2",
    seed: int = 0,
    hidden_size: int = 128,
    num_hidden_layers: int = 3,
    num_attention_heads: int = 4,
    num_key_value_heads: int = 2,
    intermediate_size: int = 384,
    max_position_embeddings: int = 2048,
    texts: tuple[str, ...] = (),
) -> Path:
    """Writes a freshly initialized model and its tokenizer.

    Args:
        directory: Created if missing; its files are overwritten.
        architecture: One of ARCHITECTURES.
        seed: Seed of the weights; the caller's random state does not change.
        hidden_size: Width.
        num_hidden_layers: Depth.
        num_attention_heads: Query heads.
        num_key_value_heads: Key and value heads.
        intermediate_size: Width of the gated MLP.
        max_position_embeddings: Longest sequence.
        texts: Texts that are one token each, such as the fixed parts of a tool call; ids from 261.

    Returns:
        The directory, with config.json, generation_config.json, model.safetensors, tokenizer.json
        and tokenizer_config.json.

    Raises:
        InvalidInput: Unknown architecture.
    """
    with collector_paused():
        import torch
        from transformers import GenerationConfig

    directory = Path(directory)
    kind, config = _configured(
        architecture,
        {
            "vocab_size": VOCAB_SIZE + len(texts),
            "hidden_size": hidden_size,
            "num_hidden_layers": num_hidden_layers,
            "num_attention_heads": num_attention_heads,
            "num_key_value_heads": num_key_value_heads,
            "intermediate_size": intermediate_size,
            "max_position_embeddings": max_position_embeddings,
            "tie_word_embeddings": True,
            "bos_token_id": None,
            "eos_token_id": END_ID,
            "pad_token_id": PAD_ID,
            "dtype": "float32",
        },
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind(config)
    model.generation_config = GenerationConfig(
        eos_token_id=END_ID, pad_token_id=PAD_ID, do_sample=True, temperature=1.0
    )
    model.save_pretrained(directory)
    save_tokenizer(directory, texts=texts)
    return directory


def _configured(architecture: str, common: dict[str, Any]) -> tuple[Any, Any]:
    """A class of transformers and its configuration."""
    import transformers

    if architecture == "qwen2":
        with collector_paused():
            return transformers.Qwen2ForCausalLM, transformers.Qwen2Config(**common)
    head_dim = common["hidden_size"] // common["num_attention_heads"]
    if architecture == "qwen3_moe":
        experts = {
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": common["intermediate_size"] // 3,
        }
        config = transformers.Qwen3MoeConfig(**common, **experts, head_dim=head_dim)
        return transformers.Qwen3MoeForCausalLM, config
    if architecture != "qwen3_5":
        expected = f"expected one of {', '.join(ARCHITECTURES)}"
        raise InvalidInput(f"architecture={architecture!r}: {expected}")
    places, words = ("image", "video", "vision_start", "vision_end"), common["vocab_size"]
    kinds = ("full_attention", "linear_attention")
    text = {
        **common,
        "vocab_size": words + len(places),
        "head_dim": head_dim,
        "layer_types": [kinds[index % 2] for index in range(common["num_hidden_layers"])],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": head_dim,
        "linear_value_head_dim": head_dim,
    }
    tower = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "patch_size": 4,
        "out_hidden_size": common["hidden_size"],
        "num_position_embeddings": 16,
    }
    whole = transformers.Qwen3_5Config(
        text_config=text,
        vision_config=tower,
        tie_word_embeddings=True,
        dtype="float32",
        **{f"{name}_token_id": words + number for number, name in enumerate(places)},
    )
    return transformers.Qwen3_5ForConditionalGeneration, whole


def make_tiny_seeing_model(directory: str | Path, *, seed: int = 0) -> Path:
    """Writes a freshly initialized Qwen2-VL: the tiny model's decoder with a small vision tower.

    Patches are 4 x 4 pixels, four of them make a token: an image of 16 x 16 pixels is 4 tokens.

    Args:
        directory: Created if missing; its files are overwritten.
        seed: Seed of the weights; the caller's random state does not change.

    Returns:
        The directory, with preprocessor_config.json beside what `make_tiny_model` writes.
    """
    import torch
    from transformers import (
        GenerationConfig,
        Qwen2VLConfig,
        Qwen2VLForConditionalGeneration,
        Qwen2VLImageProcessorPil,
    )

    directory = Path(directory)
    config = Qwen2VLConfig(
        text_config={
            "vocab_size": VIDEO_ID + 1,
            "hidden_size": 128,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 384,
            "max_position_embeddings": 2048,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [8, 4, 4],
            },
            "bos_token_id": None,
            "eos_token_id": END_ID,
            "pad_token_id": PAD_ID,
            "dtype": "float32",
        },
        vision_config={
            "depth": 2,
            "embed_dim": 64,
            "hidden_size": 128,
            "num_heads": 4,
            "mlp_ratio": 2,
            "patch_size": 4,
        },
        image_token_id=IMAGE_ID,
        video_token_id=VIDEO_ID,
        tie_word_embeddings=True,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2VLForConditionalGeneration(config)
    model.generation_config = GenerationConfig(
        eos_token_id=END_ID, pad_token_id=PAD_ID, do_sample=True, temperature=1.0
    )
    model.save_pretrained(directory)
    Qwen2VLImageProcessorPil(
        patch_size=4, size={"shortest_edge": 64, "longest_edge": 4096}
    ).save_pretrained(directory)
    save_tokenizer(directory, sees=True)
    return directory
