r"""The ``\boxed{}`` convention for final answers."""

from __future__ import annotations


def last_boxed(text: str) -> str | None:
    r"""Returns the content of the last ``\boxed{...}`` with balanced braces; None without one."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    begin = start + len("\\boxed{")
    depth = 1
    for position in range(begin, len(text)):
        if text[position] == "{":
            depth += 1
        elif text[position] == "}":
            depth -= 1
            if depth == 0:
                return text[begin:position]
    return None
