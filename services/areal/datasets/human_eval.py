"""Rows in the form of HumanEval: a function's signature and docstring, and its tests."""

from __future__ import annotations

from typing import Any

from areal.errors import InvalidInput

INSTRUCTION = "Write the whole function, with its imports, in one block of Python."


def human_eval_row(row: dict[str, Any], instruction: str = INSTRUCTION) -> dict[str, Any]:
    """Returns a row with a prompt and with tests for `code_reward`, made from a row of HumanEval.

    Args:
        row: A row with the fields "prompt" (the function's signature and docstring), "test" (source
            code that defines `check`), and "entry_point" (the name of the function to test).
        instruction: Text added before the prompt. The default asks for the whole function; "" adds
            nothing.

    Returns:
        {"messages", "tests": source code, "prefix": the row's "prompt"}. `tests` and `prefix` are
        arguments of `areal.rewards.code.code_reward`. Pass `prefix` only for a model that continues
        the prompt instead of writing the whole function.

    Raises:
        InvalidInput: A field is missing or is not text.
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
