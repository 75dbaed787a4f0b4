"""`areal run trainer.type=sft …`: runs one of the examples, which the wheel has, too."""

from __future__ import annotations

import contextlib
from importlib import metadata
from pathlib import Path

from areal.errors import InvalidInput, nearest

_KEY = "trainer.type="
RECIPES = {
    "distill": "distill.py",
    "dpo": "dpo.py",
    "grpo": "arithmetic_grpo.py",
    "null": "eval_only.py",
    "ppo": "ppo_critic.py",
    "rw": "reward_model.py",
    "sft": "gsm8k_sft.py",
}
"""File names of examples, by `trainer.type`."""
EXAMPLES = Path(__file__).parents[3] / "examples"


def find_recipe(recipe: Path, overrides: list[str]) -> tuple[Path, list[str]]:
    """Returns the recipe's file and the overrides without `trainer.type`.

    Args:
        recipe: The first argument: a file, or an override if `trainer.type` is among them.
        overrides: The other arguments.

    Raises:
        InvalidInput: There is no such type, or this installation has no examples.
    """
    values = [str(recipe), *overrides]
    chosen = [value.removeprefix(_KEY) for value in values if value.startswith(_KEY)]
    if not chosen:
        return recipe, overrides
    rest = [value for value in values if not value.startswith(_KEY)]
    if len(chosen) > 1 or (not str(recipe).startswith(_KEY) and "=" not in str(recipe)):
        raise InvalidInput(f"{_KEY}{chosen[-1]}: expected once, in place of a recipe")
    if chosen[0] not in RECIPES:
        raise InvalidInput(f"{_KEY}{chosen[0]}: no such recipe{nearest(chosen[0], RECIPES)}")
    return find_example(RECIPES[chosen[0]]), rest


def find_example(name: str) -> Path:
    """Returns a file of the examples: of the checkout, or of the installed distribution.

    Raises:
        InvalidInput: This installation has no such file.
    """
    if (EXAMPLES / name).is_file():
        return EXAMPLES / name
    with contextlib.suppress(metadata.PackageNotFoundError):
        for file in metadata.files("areal-services") or ():
            if file.parts[-4:] == ("share", "areal", "examples", name):
                return Path(str(file.locate())).resolve()
    raise InvalidInput(
        f"{name}: expected a checkout with examples/, or the distribution areal-services, which "
        "has them"
    )
