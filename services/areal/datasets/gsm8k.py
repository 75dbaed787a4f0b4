"""Rows in the form of GSM8K: {"question", "answer": "... #### N"}."""

from __future__ import annotations

from typing import Any

from areal.errors import InvalidInput

INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."


def gsm8k_row(row: dict[str, Any], instruction: str = INSTRUCTION) -> dict[str, Any]:
    r"""Returns a row for `RLVRWorkflow`, made from a row of GSM8K.

    Args:
        row: A row with the fields "question" and "answer". The answer's last line is "#### N".
        instruction: Text added after the question. The default asks for the answer in ``\boxed{}``;
            "" adds nothing.

    Returns:
        {"messages", "answer": N without thousands separators, "solution": the text before "####"}.

    Raises:
        InvalidInput: A field is missing or is not text, or the answer does not end in "#### N".
    """
    for key in ("question", "answer"):
        if not isinstance(row.get(key), str):
            raise InvalidInput(f"GSM8K row: field {key!r} is missing or not text")
    solution, mark, final = row["answer"].rpartition("####")
    if not mark or not final.strip():
        raise InvalidInput(f"GSM8K row: answer {row['answer'][-80:]!r} does not end in '#### N'")
    content = f"{row['question']}\n{instruction}" if instruction else row["question"]
    return {
        "messages": [{"role": "user", "content": content}],
        "answer": final.strip().replace(",", ""),
        "solution": solution.strip(),
    }
