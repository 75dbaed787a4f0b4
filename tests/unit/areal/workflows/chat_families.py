"""The chat formats of real models: their templates, and small tokenizers with their special tokens.

The vocabularies are trained on a few lines, so that text splits into several pieces and most random
ids are not how the tokenizer would have written them.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from areal.tokenizer import Tokenizer

TEMPLATES = Path(__file__).parent / "chat_templates"
# (special tokens, of which the first ends a turn; other added tokens; which end a generation)
FAMILIES = {
    "qwen2.5": (
        ["<|im_end|>", "<|endoftext|>", "<|im_start|>"],
        ["<tool_call>", "</tool_call>"],
        ["<|im_end|>", "<|endoftext|>"],
    ),
    "qwen3": (
        ["<|im_end|>", "<|endoftext|>", "<|im_start|>"],
        ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>",
         "</think>"],
        ["<|im_end|>", "<|endoftext|>"],
    ),
    "llama-3.1": (
        ["<|eot_id|>", "<|end_of_text|>", "<|eom_id|>", "<|begin_of_text|>", "<|python_tag|>",
         "<|start_header_id|>", "<|end_header_id|>"],
        [],
        ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"],
    ),
    "glm-4.6": (
        ["<|user|>", "<|observation|>", "<|endoftext|>", "<|assistant|>", "<|system|>", "[gMASK]",
         "<sop>"],
        ["<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>",
         "<arg_value>", "</arg_value>"],
        ["<|endoftext|>", "<|user|>", "<|observation|>"],
    ),
    "minimax-m2": (
        ["[e~[", "]~b]", "]~!b["],
        ["<think>", "</think>", "<minimax:tool_call>", "</minimax:tool_call>"],
        ["[e~["],
    ),
}  # fmt: skip
CORPUS = [
    "What is the answer to the question? The answer is 46, the sum of 12 and 34.",
    'Try again, that is wrong. <user> system assistant tool {"name": "add", "arguments": {}}',
    "été, naïve, Größe, 数学, ответ, 😀 and the rest of the words of the world",
] * 4


def template(family: str) -> str:
    return (TEMPLATES / f"{family}.jinja").read_text()


@cache
def tokenizer(family: str) -> Tokenizer:
    return build(template(family), *FAMILIES[family])


def build(source: str, special: list[str], added: list[str], ends: list[str]) -> Tokenizer:
    """A small tokenizer of a family; see FAMILIES for the arguments."""
    backend = Backend(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    backend.add_tokens([AddedToken(t, special=False, normalized=False) for t in added])
    return Tokenizer(
        backend,
        chat_template=source,
        special_tokens={"bos_token": "<|begin_of_text|>", "eos_token": ends[0]},
        eos_token_ids=[backend.token_to_id(t) for t in ends],
    )


def end_of_turn(family: str) -> int:
    found: int | None = tokenizer(family).backend.token_to_id(FAMILIES[family][0][0])
    assert found is not None
    return found
