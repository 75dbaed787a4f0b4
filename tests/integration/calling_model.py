"""A model that really calls a tool: each next token depends on the one before it alone.

    \\n ──> letters ──> <tool_call> ──> echo ──> digits ──> >> made.txt ──> </tool_call> ──> end
          └──┘ 1/2                            └──┘ 1/2
    :  ──> letters ──> end

The letters and digits are sampled, so that no two answers are alike, and each is a call. It is a
Qwen2 whose one layer adds nothing: embeddings are unit vectors, the head is the table of
transitions. So any engine serves it.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import torch
from tests.unit.areal.workflows.chat_families import FAMILIES, template, tokenizer

FILE = "made.txt"
ECHO = '\n{"name": "bash", "arguments": {"command": "echo ', f' >> {FILE}"}}}}\n'
ADD = '\n{"name": "add", "arguments": {"a": 1', ', "b": 2}}\n'
_BEGIN = "<|im_start|>assistant\\n"
_AFTER_TOOL = "<|im_start|>assistant\\n:"
_HIDDEN = 512
_NEVER = -30.0
"""Logprob of what must not come, before the head's sum to 1."""


def make_calling_model(folder: Path, context: int, call: tuple[str, str] = ECHO) -> None:
    """Writes it, with the tokenizer and the chat template of Qwen2.5.

    Args:
        folder: Where.
        context: Longest sequence, in tokens.
        call: What is before and after a call's digits. If it is `ADD`, the template begins the
            answer to a tool's result with a colon, and the model continues with letters.
    """
    from transformers import AutoModelForCausalLM, Qwen2Config

    known = tokenizer("qwen2.5")
    backend = type(known.backend).from_str(known.backend.to_str())
    backend.add_tokens(list(call))
    end = FAMILIES["qwen2.5"][0][0]
    size = backend.get_vocab_size()

    def ids(*tokens: str) -> list[int]:
        found = [backend.token_to_id(token) for token in tokens]
        assert None not in found, tokens
        return found

    # What is not named here never comes after anything, and all follows it alike.
    follows = torch.full((size, size), _NEVER)
    chain = [ids("Ċ"), ids(*"abcdef"), ids("<tool_call>"), ids(call[0]), ids(*"0123456789")]
    chain += [ids(call[1]), ids("</tool_call>"), ids(end)]
    spoken = [ids(":"), ids(*"ghijkl"), ids(end)]
    for now, then in [*pairwise(chain), *pairwise(spoken)]:
        for token in now:
            follows[token, then] = -torch.tensor(float(len(then))).log()
            if len(now) > 1:  # one more of them, as often
                follows[token, now] = -torch.tensor(float(len(now))).log()

    config = Qwen2Config(
        vocab_size=size,
        hidden_size=_HIDDEN,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        tie_word_embeddings=False,
        bos_token_id=ids("<|endoftext|>")[0],
        eos_token_id=ids(end)[0],
        pad_token_id=ids("<|endoftext|>")[0],
    )
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        layer = model.model.layers[0]
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
        model.model.norm.weight.fill_(1.0)
        model.model.embed_tokens.weight.copy_(torch.eye(size, _HIDDEN))
        # The norm makes a unit vector as long as the root of its size.
        model.lm_head.weight.zero_()
        model.lm_head.weight[:, :size] = follows.T / _HIDDEN**0.5
    model.save_pretrained(folder)
    backend.save(str(folder / "tokenizer.json"))
    shown = template("qwen2.5")
    if call is ADD:
        begin = f"messages[-1].role == 'tool' and '{_AFTER_TOOL}' or '{_BEGIN}'"
        assert shown.count(f"{{{{- '{_BEGIN}' }}}}") == 1
        shown = shown.replace(f"{{{{- '{_BEGIN}' }}}}", f"{{{{- {begin} }}}}")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": end,
        "pad_token": "<|endoftext|>",
        "chat_template": shown,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
