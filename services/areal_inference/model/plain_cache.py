"""What the plain back end remembers of running requests: caches of transformers, and their rows.

    prefill ──> State (the cache of all sequences of one length), frozen: rows may be shared later
                  │ decode: the rows of one length, wherever they were, gathered into a new State
                  └ share: a row that points into it

What a cache holds is the architecture's own affair: keys, windows, recurrent states, convolutions.
Rows are picked from whatever tensors it has; `PlainModel` tries at its start that this is right.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Routes = npt.NDArray[np.int32]
"""The experts of a token, [layers, k]."""


@dataclass(eq=False, slots=True)
class State:
    """A cache of transformers."""

    cache: Any
    size: int
    """Number of its sequences."""
    frozen: bool
    """Whether the state must not advance, because rows may refer to it as the state after a
    prompt."""


@dataclass(slots=True)
class Row:
    """One running request of the cache."""

    ids: list[int] = field(default_factory=list)
    """Tokens computed so far."""
    state: State | None = None
    """The state that has the row; None: nothing is kept."""
    index: int = 0
    """The row's index in the state."""
    prompt: Row | None = None
    """The row as its prefill left it."""
    routes: list[Routes] = field(default_factory=list)
    """The experts of each computed token; empty if the model has none."""


class PlainCache:
    """See `runner.Cache`; memory grows with the requests."""

    def __init__(self, max_length: int) -> None:
        self.length = max_length
        self.rows: dict[int, Row] = {}

    def reserve(self, rows: int, length: int, budget: int) -> None:
        """Does nothing: `ModelRunner.fits` limits what is admitted."""

    def share(self, source: int, targets: list[int], length: int) -> None:
        """Points rows to the state after another row's prompt, if that row still has it."""
        row = self.rows.get(source, Row())
        prompt = row.prompt
        for target in targets:
            kept = prompt is not None and len(prompt.ids) == length
            state, index = (prompt.state, prompt.index) if prompt and kept else (None, 0)
            routes = row.routes[:length]
            self.rows[target] = Row(row.ids[:length], state, index, routes=routes)

    def move(self, sources: list[int], targets: list[int], length: int) -> None:
        """Gives rows other numbers."""
        moved = [self.rows.pop(row) for row in sources]
        self.rows.update(zip(targets, moved, strict=True))

    def clear(self, row: int) -> None:
        """Forgets one row of the cache."""
        self.rows.pop(row, None)

    def reset(self) -> None:
        """Forgets all rows and states."""
        self.rows.clear()


def gathered(rows: Sequence[Row]) -> State:
    """Returns a state with exactly these rows, in this order, which may advance."""
    first = rows[0].state
    assert first is not None
    if (
        not first.frozen
        and first.size == len(rows)
        and all(row.state is first and row.index == index for index, row in enumerate(rows))
    ):
        return first
    parts = list[tuple[Any, int, list[int]]]()
    before: State | None = None
    for row in rows:
        assert row.state is not None
        if row.state is not before:
            before = row.state
            parts.append((before.cache, before.size, []))
        parts[-1][2].append(row.index)
    return State(_picked([(c, n, torch.tensor(at)) for c, n, at in parts]), len(rows), frozen=False)


def _picked(parts: list[tuple[Any, int, Tensor]]) -> Any:
    """Copies the same part of several caches, with some of the sequences of each.

    Args:
        parts: (cache or part of it, its sequences, which of them).
    """
    first = parts[0][0]
    if isinstance(first, Tensor):
        if not all(value.ndim and len(value) == size for value, size, _ in parts):
            return first.clone()
        return torch.cat([value.index_select(0, at) for value, _, at in parts])
    if isinstance(first, dict):
        return {key: _picked([(value[key], n, at) for value, n, at in parts]) for key in first}
    if isinstance(first, list | tuple):
        columns = zip(*(value for value, _, _ in parts), strict=True)
        made = [
            _picked([(item, n, at) for item, (_, n, at) in zip(column, parts, strict=True)])
            for column in columns
        ]
        return type(first)(made)
    kind = type(first)
    if "cache" not in kind.__module__ and not kind.__name__.endswith(("Cache", "Layer")):
        return first
    made = copy.copy(first)
    for key in vars(first):
        setattr(made, key, _picked([(vars(each)[key], n, at) for each, n, at in parts]))
    return made
