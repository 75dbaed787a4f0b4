"""Why a conversation became several trajectories: where its history first differs.

    earlier   system: it is 12:00 | user: hi | ANSWER
    later     system: it is 12:01 | user: hi | ANSWER | user: more
                               ^ here, although the earlier answer follows

`areal show` tells where. Such a trajectory has the part `SPLITS`, so the trainer counts them, and
its `split` names the message and the field.

A prompt that shows none of the earlier answers is another conversation, and is not explained; nor
is a branch, whose prompt begins with an earlier prompt and answer.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from areal.agents.outlines import differences
from areal.agents.tree import Merged
from areal.tokenizer import Tokenizer
from areal.types import SPLITS, Trajectory

Segments = Sequence[tuple[bool, str]]
"""(sampled, text) in order: one trajectory, or one kept sample."""
UNKNOWN = "prompt"
"""The field that is named if it is unknown where a prompt differs: for prompts of token ids, and
for equal messages that were rendered differently."""
_AROUND = 24
_NEAR = 64
"""How many samples back a conversation is looked for."""
_CHUNK = 4096


def explain(samples: Sequence[Segments]) -> list[str]:
    """Returns for each sample why it does not continue an earlier one, or "" if it need not.

    Args:
        samples: The trajectories of one agent's attempt, or of a group, in order.
    """
    wholes = ["".join(text for _, text in sample) for sample in samples]
    return [_why(samples, wholes, number) for number in range(len(samples))]


def mark(merged: Merged, tokenizer: Tokenizer) -> None:
    """Marks each trajectory of an attempt that should have continued an earlier one."""
    if len(merged.trajectories) < 2:
        return
    samples = [_segments(each, tokenizer) for each in merged.trajectories]
    split = [number for number, why in enumerate(explain(samples)) if why]
    paths = differences(merged.outlines, [merged.chains[number][0] for number in split])
    for number, path in zip(split, paths, strict=True):
        trajectory = merged.trajectories[number]
        trajectory.reward_parts[SPLITS] = 1.0
        trajectory.split = path or UNKNOWN


def _segments(trajectory: Trajectory, tokenizer: Tokenizer) -> Segments:
    mask, ids = trajectory.loss_mask, trajectory.input_ids
    edges = [0, *(np.flatnonzero(mask[1:] != mask[:-1]) + 1).tolist(), len(ids)]
    return [
        (bool(mask[begin]), tokenizer.decode(ids[begin:end].tolist()))
        for begin, end in itertools.pairwise(edges)
    ]


def _why(samples: Sequence[Segments], wholes: Sequence[str], number: int) -> str:
    prompt = samples[number][0][1] if samples[number] and not samples[number][0][0] else ""
    best, why = 0, ""
    for earlier in range(max(0, number - _NEAR), number):
        whole = wholes[earlier]
        same = equal(prompt, whole)
        if same > best and same < len(prompt) and (where := _shown(samples[earlier], prompt, same)):
            here, there = (_snippet(text, same) for text in (prompt, whole))
            best, why = same, f"{where} of sample {earlier}: {here!r}, where it was {there!r}"
    return why


def _shown(earlier: Segments, prompt: str, same: int) -> str:
    """Returns where a prompt departs from an earlier sample whose answers it shows, or "".

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
                return where  # an assistant's message is where the answer was
        if sampled:
            shown = shown or bool(where and begin >= same and text.strip() in prompt[same:])
            answers += 1
    return where if shown else ""


def equal(one: str, other: str) -> int:
    """Returns how many characters at the start are equal."""
    least, at = min(len(one), len(other)), 0
    while at < least and one[at : at + _CHUNK] == other[at : at + _CHUNK]:
        at += _CHUNK
    return next((i for i in range(at, least) if one[i] != other[i]), least)


def _snippet(text: str, at: int) -> str:
    return text[max(0, at - _AROUND) : at + _AROUND]
