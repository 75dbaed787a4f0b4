"""Why a conversation became several trajectories: where its history first differs.

    earlier   system: it is 12:00 | user: hi | ANSWER
    later     system: it is 12:01 | user: hi | ANSWER | user: more
                               ^ here, although the earlier answer follows

A prompt that shows none of the earlier answers is another conversation, and is not explained; nor
is a branch, whose prompt begins with an earlier prompt and answer.
"""

from __future__ import annotations

from collections.abc import Sequence

Segments = Sequence[tuple[bool, str]]
"""(sampled, text) in order: one trajectory, or one kept sample."""
_AROUND = 24


def explain(samples: Sequence[Segments]) -> list[str]:
    """Returns for each sample why it does not continue an earlier one, or "" if it need not.

    Args:
        samples: The trajectories of one agent's attempt, or of a group, in order.
    """
    return [_why(samples, number) for number in range(len(samples))]


def _why(samples: Sequence[Segments], number: int) -> str:
    prompt = samples[number][0][1] if samples[number] and not samples[number][0][0] else ""
    best, why = 0, ""
    for earlier in range(number):
        whole = "".join(text for _, text in samples[earlier])
        same = _equal(prompt, whole)
        if same > best and same < len(prompt) and (where := _shown(samples[earlier], prompt, same)):
            here, there = (_snippet(text, same) for text in (prompt, whole))
            best, why = same, f"{where} of sample {earlier}: {here!r}, where it was {there!r}"
    return why


def _shown(earlier: Segments, prompt: str, same: int) -> str:
    """Where a prompt leaves an earlier sample whose answers it shows; "": it shows none.

    Args:
        earlier: The earlier sample.
        prompt: The prompt.
        same: Up to this character both are equal.
    """
    at, answers, where, shown = 0, 0, "", False
    for sampled, text in earlier:
        begin, at = at, at + len(text)
        if same < at and not where:
            where = f"in answer {answers}" if sampled else f"before answer {answers}"
            if sampled:
                return where  # an assistant's message stands where the answer was
        if sampled:
            shown = shown or bool(where and begin >= same and text.strip() in prompt[same:])
            answers += 1
    return where if shown else ""


def _equal(one: str, other: str) -> int:
    """How many characters at the start are equal."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def _snippet(text: str, at: int) -> str:
    return text[max(0, at - _AROUND) : at + _AROUND]
