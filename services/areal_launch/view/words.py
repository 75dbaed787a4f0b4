"""Words for people that several views share."""

from __future__ import annotations

from areal.types import TaskState

# A step's tasks are the trainer's until a checkpoint holds what it learned from them.
_WORDS = {TaskState.BATCHED: "in training", TaskState.TRAINED: "trained and saved"}


def state_word(state: TaskState) -> str:
    """A task's state."""
    return _WORDS.get(state, state.value.replace("_", "-"))


def pause_words(seconds: float) -> str:
    """How long an update of weights holds a server up, in seconds; 0: it generates all along."""
    return f"{seconds * 1000:.0f} ms pause each" if seconds else "no pause"
