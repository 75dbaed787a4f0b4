"""Walks over rows forever, in a new order each epoch, from any point."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from areal.errors import InvalidInput

# (epoch, index, row): index is the place in the epoch's order, 0 to len(rows) - 1, and
# (epoch, index) identifies the item within a trial.
DatasetItem = tuple[int, int, dict[str, Any]]


class StatefulLoader:
    """An endless iterator of rows that can be resumed exactly.

    Item (epoch, index) is `rows[order(epoch)[index]]`, where the order is a permutation drawn from
    (seed, epoch) alone: the same place always means the same row, at any time. As
    `index` counts along that order, "the lowest index not ended" is all that a checkpoint keeps.

    Example:
        >>> loader = StatefulLoader(rows, seed=1)
        >>> for epoch, index, row in loader.take(64): ...
        >>> again = StatefulLoader(rows, seed=1, epoch=0, cursor=32)  # resumes at item 32
    """

    def __init__(
        self,
        rows: Sequence[dict[str, Any]],
        *,
        seed: int = 0,
        shuffle: bool = True,
        epoch: int = 0,
        cursor: int = 0,
    ) -> None:
        """Starts at (epoch, cursor).

        Args:
            rows: At least one; held, not copied.
            seed: Seed of the orders, 0 or more.
            shuffle: False: every epoch in file order.
            epoch: Where to start.
            cursor: Index within the epoch to start at; len(rows) means the next epoch.

        Raises:
            InvalidInput: No rows, or a place outside of the data.
        """
        if not rows:
            raise InvalidInput("dataset: has no rows")
        if seed < 0:
            raise InvalidInput(f"dataset seed {seed}: expected 0 or more")
        self.rows = rows
        self._seed = seed
        self._shuffle = shuffle
        self._order: npt.NDArray[np.int64] | None = None
        self._order_epoch = -1
        self.seek(epoch, cursor)

    def seek(self, epoch: int, cursor: int) -> None:
        """Goes to a place; the next item is (epoch, cursor)."""
        if epoch < 0 or not 0 <= cursor <= len(self.rows):
            raise InvalidInput(
                f"dataset position epoch {epoch}, cursor {cursor}: expected epoch >= 0 and cursor "
                f"0 to {len(self.rows)}"
            )
        self.epoch, self.cursor = epoch, cursor

    def state(self) -> dict[str, int]:
        """{"epoch", "cursor"} of the next item: the arguments that resume here."""
        return {"epoch": self.epoch, "cursor": self.cursor}

    def at(self, epoch: int, index: int) -> DatasetItem:
        """The item at a place, without moving."""
        if not 0 <= index < len(self.rows):
            raise InvalidInput(f"dataset index {index}: expected 0 to {len(self.rows) - 1}")
        if not self._shuffle:
            return epoch, index, self.rows[index]
        if self._order is None or self._order_epoch != epoch:
            self._order = np.random.default_rng([self._seed, epoch]).permutation(len(self.rows))
            self._order_epoch = epoch
        return epoch, index, self.rows[int(self._order[index])]

    def take(self, count: int) -> list[DatasetItem]:
        """The next `count` items; runs over into the next epoch where needed."""
        return [next(self) for _ in range(count)]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[DatasetItem]:
        return self

    def __next__(self) -> DatasetItem:
        if self.cursor == len(self.rows):
            self.epoch, self.cursor = self.epoch + 1, 0
        item = self.at(self.epoch, self.cursor)
        self.cursor += 1
        return item
