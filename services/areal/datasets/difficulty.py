"""Rows by how hard they are: easy ones first, or only those that a model can learn from.

rows ──of_pass_rate──> neither always right nor always wrong
rows ──CurriculumLoader──> from easy to hard in the first epoch, shuffled in each later one
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from areal.datasets.loader import StatefulLoader
from areal.errors import InvalidInput
from areal.tokenizer.json_text import loads

_INDEX = re.compile(r"-(\d+)\Z")


class CurriculumLoader(StatefulLoader):
    """A `StatefulLoader` whose first epochs go from easy rows to hard ones.

    It can be resumed exactly: its order depends only on the rows, difficulties, seed and epoch.

    Example:
        >>> CurriculumLoader(rows, lambda row: len(row["prompt"]), seed=1)
    """

    def __init__(
        self,
        rows: Sequence[dict[str, Any]],
        difficulty: Callable[[dict[str, Any]], float],
        *,
        seed: int = 0,
        epochs: int = 1,
    ) -> None:
        """Computes each row's difficulty once.

        Args:
            rows: The rows, at least one.
            difficulty: A function that takes a row and returns a larger number for a harder row.
                Equally hard rows are shuffled.
            seed: Random seed for shuffling, 0 or more.
            epochs: Number of epochs that go from easy to hard; later epochs are shuffled.

        Raises:
            InvalidInput: There are no rows, or `seed` or `epochs` is negative.
        """
        super().__init__(rows, seed=seed)
        if epochs < 0:
            raise InvalidInput(f"curriculum epochs {epochs}: expected 0 or more")
        self._difficulties = np.array([float(difficulty(row)) for row in rows])
        self._epochs = epochs

    def _permutation(self, epoch: int) -> npt.NDArray[np.int64]:
        shuffled = super()._permutation(epoch)
        if epoch >= self._epochs:
            return shuffled
        return shuffled[np.argsort(self._difficulties[shuffled], kind="stable")]


def of_pass_rate(
    rows: Sequence[dict[str, Any]],
    evaluation: str | Path,
    *,
    least: float = 0.05,
    most: float = 0.95,
) -> list[dict[str, Any]]:
    """Returns the rows whose mean reward in an evaluation was neither very low nor very high.

    The other rows cost generation time and teach little: often, all rewards of their group are
    equal, and such a group gives no gradient (see the metric `group/zero_std`).

    Args:
        rows: The rows that were evaluated, in the same order.
        evaluation: A file `evaluations/NAME-vVERSION.jsonl` in a run folder, which `areal eval` or
            `RemoteSGLangEngine.evaluate` wrote. It has `gconfig.n_samples` answers to each row.
        least: Rows with a lower mean reward are left out.
        most: Rows with a higher mean reward are left out.

    Raises:
        InvalidInput: The file is missing or has the wrong format, it has more rows than `rows`, or
            no row has a mean reward between `least` and `most`.

    Example:
        >>> of_pass_rate(rows, "runs/eval/trial0/evaluations/reward-v0.jsonl", least=0.2)
    """
    rates = _pass_rates(Path(evaluation), len(rows))
    kept = [rows[index] for index, rate in sorted(rates.items()) if least <= rate <= most]
    if not kept:
        raise InvalidInput(
            f"{str(evaluation)!r}: no row has a mean reward of {least:g} to {most:g}"
        )
    return kept


def _pass_rates(file: Path, count: int) -> dict[int, float]:
    try:
        lines = file.read_bytes().splitlines()
    except OSError as error:
        raise InvalidInput(f"evaluation {str(file)!r}: {error.strerror}") from None
    rates = {}
    for number, line in enumerate(lines, 1):
        try:
            answered = loads(line)
            index = int(_INDEX.search(answered["task_id"])[1])  # type: ignore[index]
            rewards = [float(each["reward"]) for each in answered["answers"]]
            if "failed" in answered:  # nothing is known of how hard the row is
                continue
            rates[index] = 0.0 if "rejected" in answered else sum(rewards) / len(rewards)
        except (ValueError, KeyError, TypeError, ZeroDivisionError):
            raise InvalidInput(
                f"{file}:{number}: expected a line of answers as rollout.evaluate writes it"
            ) from None
    if rates and max(rates) >= count:
        raise InvalidInput(
            f"evaluation {str(file)!r}: has row {max(rates)}, but there are {count} rows: expected "
            "the rows that were evaluated"
        )
    return rates
