"""Iterates over rows endlessly, in a new order each epoch, from any position."""

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
    """An endless iterator over rows that uses a new order each epoch and can be resumed exactly.

    It yields (epoch, index, row), where `index` is the position in the epoch's order. The order
    depends only on the seed and the epoch. Therefore a position always means the same row, and a
    checkpoint stores only the position.

    Example:
        >>> loader = StatefulLoader(rows, seed=1)
        >>> loader.seek(0, 32)
        >>> epoch, index, row = next(loader)  # item (0, 32)
    """

    def __init__(
        self, rows: Sequence[dict[str, Any]], *, seed: int = 0, shuffle: bool = True
    ) -> None:
        """Starts at epoch 0, index 0.

        Args:
            rows: The rows, at least one. The sequence is not copied.
            seed: Seed for shuffling, 0 or more.
            shuffle: If False, every epoch uses the order of `rows`.

        Raises:
            InvalidInput: There are no rows, or `seed` is negative.
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
        self.epoch = self.cursor = 0

    def seek(self, epoch: int, cursor: int) -> None:
        """Moves to another position.

        Args:
            epoch: The epoch of the next row, 0 or more.
            cursor: The index of the next row, 0 to len(rows); len(rows) means the start of the next
                epoch.

        Raises:
            InvalidInput: `epoch` or `cursor` is out of range.
        """
        if epoch < 0 or not 0 <= cursor <= len(self.rows):
            raise InvalidInput(
                f"dataset position epoch {epoch}, cursor {cursor}: expected epoch >= 0 and cursor "
                f"0 to {len(self.rows)}"
            )
        self.epoch, self.cursor = epoch, cursor

    def __iter__(self) -> Iterator[DatasetItem]:
        return self

    def __next__(self) -> DatasetItem:
        if self.cursor == len(self.rows):
            self.epoch, self.cursor = self.epoch + 1, 0
        index, self.cursor = self.cursor, self.cursor + 1
        if not self._shuffle:
            return self.epoch, index, self.rows[index]
        if self._order is None or self._order_epoch != self.epoch:
            self._order, self._order_epoch = self._permutation(self.epoch), self.epoch
        return self.epoch, index, self.rows[int(self._order[index])]

    def _permutation(self, epoch: int) -> npt.NDArray[np.int64]:
        """An epoch's order: the row at each place, by nothing that changes within a trial."""
        return np.random.default_rng([self._seed, epoch]).permutation(len(self.rows))
