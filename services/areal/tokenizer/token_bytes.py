"""The bytes that each token stands for: joined, they are the text in UTF-8.

A character may be several tokens, of which none is a text by itself:

    "数" ── tokens ──> "æķ", "°"        (byte-level: each character of a token is a byte)
         └─────────> <0xE6> <0x95> <0xB0>  (byte fallback)
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache

from areal.tokenizer import Tokenizer

_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_NO_CHARACTER = "\N{REPLACEMENT CHARACTER}"


def token_bytes(tokenizer: Tokenizer, ids: Sequence[int]) -> list[bytes]:
    """Returns the bytes of each token of a text; special tokens are part of it."""
    return [_bytes(tokenizer, each, first=not at) for at, each in enumerate(ids)]


def _bytes(tokenizer: Tokenizer, token_id: int, first: bool) -> bytes:
    text = tokenizer.decode([token_id])
    if _NO_CHARACTER in text:
        token = tokenizer.backend.id_to_token(token_id) or ""
        if found := _FALLBACK.fullmatch(token):
            return bytes([int(found[1], 16)])
        alphabet = _byte_alphabet()
        if token and all(character in alphabet for character in token):
            return bytes(alphabet[character] for character in token)
    elif not first:  # Sentencepiece drops a blank at the start of a text only.
        text = tokenizer.decode([token_id, token_id]).removeprefix(text)
    return text.encode()


@cache
def _byte_alphabet() -> dict[str, int]:
    """The byte that each character of a byte-level token stands for (GPT-2's table)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {
        chr(256 + index): byte for index, byte in enumerate(others)
    }
