"""`trainer.type` names a recipe of the repository."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from areal.errors import InvalidInput
from areal_launch.cli import app
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
        (["trainer.type=pop"], "no such recipe; did you mean 'ppo'"),
        (["trainer.type=zzz"], "expected one of distill, dpo, grpo, null, ppo, rw, sft"),
        (["mine.py", "trainer.type=sft"], "once, in place of a recipe"),
        (["trainer.type=sft", "trainer.type=dpo"], "once, in place of a recipe"),
    ],
)
def test_type_when_it_makes_no_sense_then_refused_in_one_line(arguments, why) -> None:
    with pytest.raises(InvalidInput, match=why):
        find_recipe(Path(arguments[0]), arguments[1:])


@pytest.mark.parametrize("verb", ["config", "check", "doctor"])
def test_type_when_given_to_another_verb_then_it_is_the_same_recipe(verb: str) -> None:
    answer = CliRunner().invoke(app, [verb, "trainer.type=pop"])
    assert answer.exit_code == 2
    assert "did you mean 'ppo'?" in answer.output


def test_config_when_of_a_type_then_prints_its_experiment() -> None:
    answer = CliRunner().invoke(app, ["config", "trainer.type=ppo", "seed=3"])
    assert answer.exit_code == 0, answer.output
    assert "algorithm: ppo" in answer.output
    assert "seed: 3" in answer.output
