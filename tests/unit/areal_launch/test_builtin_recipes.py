"""`trainer.type` names a recipe of the repository."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal.errors import InvalidInput
from areal_launch.commands.builtin_recipes import EXAMPLES, RECIPES, find_recipe
from areal_launch.commands.stack import read_experiment


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_type_when_known_then_its_example_is_read_with_the_other_overrides(name: str) -> None:
    file, rest = find_recipe(Path(f"trainer.type={name}"), ["seed=3"])
    assert file == EXAMPLES / RECIPES[name]
    config, module = read_experiment(file, None, rest)
    assert config.seed == 3
    assert callable(module.main)
    assert find_recipe(Path("seed=3"), [f"trainer.type={name}"]) == (file, ["seed=3"])


def test_type_when_not_given_then_the_recipe_is_ones_own() -> None:
    assert find_recipe(Path("mine.py"), ["seed=3"]) == (Path("mine.py"), ["seed=3"])


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["trainer.type=stf"], "no such recipe; did you mean 'sft'"),
        (["trainer.type=zzz"], "expected one of distill, dpo, grpo, null, ppo, rw, sft"),
        (["mine.py", "trainer.type=sft"], "once, in place of a recipe"),
        (["trainer.type=sft", "trainer.type=dpo"], "once, in place of a recipe"),
    ],
)
def test_type_when_it_makes_no_sense_then_refused_in_one_line(arguments, why) -> None:
    with pytest.raises(InvalidInput, match=why):
        find_recipe(Path(arguments[0]), arguments[1:])
