"""What an evaluation may be called, and that it has rows. No torch here."""

from __future__ import annotations

import re
from collections.abc import Sized

from areal.errors import InvalidInput
from areal.recipe import called_at
from areal.runs.run_files import EVALUATIONS, MEASURED_AT

TAKEN = frozenset(
    f"{EVALUATIONS} {MEASURED_AT} accounting cause cpu_s findings invocations loss loss_first "
    "loss_last memory_mb not_current recipe_failures restarts reward_first reward_last samples "
    "staleness status steps tokens_generated wall_s weight_updates".split()
)
"""Names that no evaluation or recorded result may have: a summary has other figures under them."""
# It begins a file's name and the ids of tasks.
_NAME = re.compile("[A-Za-z0-9_][A-Za-z0-9._:-]{0,99}")


def check_arguments(rows: object, name: object) -> None:
    """Checks the arguments of `rollout.evaluate`, before anything is sampled.

    Raises:
        InvalidInput: There are no rows, or the name has other characters or is taken.
    """
    who = f"{called_at()}: evaluate"
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidInput(
            f"{who}: name {name!r:.80}: expected 1 to 100 of [A-Za-z0-9._:-], such as 'heldout'"
        )
    if name in TAKEN:
        raise InvalidInput(
            f"{who}: name {name!r}: the run's summary has a figure of this name: expected another "
            f"one, such as 'heldout_{name}'"
        )
    # A generator has no length, and the check of its prompts would leave nothing of it.
    count = len(rows) if isinstance(rows, Sized) else type(rows).__name__
    if not isinstance(count, int) or not count:
        raise InvalidInput(
            f"{who}: rows: expected a list with at least one row, got {count or 'none'}"
        )
