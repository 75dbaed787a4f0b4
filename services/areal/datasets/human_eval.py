"""Rows in the form of HumanEval: a function's signature and docstring, and its tests."""

from __future__ import annotations

from typing import Any

from areal.errors import InvalidInput

INSTRUCTION = "Write the whole function, with its imports, in one block of Python."


def human_eval_row(row: dict[str, Any], instruction: str = INSTRUCTION) -> dict[str, Any]:
    """Turns one HumanEval row into a prompt and tests for `code_reward`.

    Args:
        row: Has "prompt", "test" (which defines `check`), and "entry_point".
        instruction: Text before the function's signature; "" leaves it out.

    Returns:
        {"messages", "tests", "prefix": the prompt, for a model that completes text}.

    Raises:
        InvalidInput: A field is missing.
    """
    for key in ("prompt", "test", "entry_point"):
        if not isinstance(row.get(key), str):
            raise InvalidInput(f"HumanEval row: field {key!r} is missing or not text")
    question = f"```python\n{row['prompt']}```"
    content = f"{instruction}\n\n{question}" if instruction else question
    return {
        "messages": [{"role": "user", "content": content}],
        "tests": f"{row['test']}\ncheck({row['entry_point']})",
        "prefix": row["prompt"],
    }
