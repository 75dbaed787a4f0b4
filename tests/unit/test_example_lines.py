"""Lines that readers copy start an example as it is, and a mistyped key gets the nearest name."""

from __future__ import annotations

import ast
import re
import shlex
from dataclasses import fields
from functools import cache
from importlib.metadata import distributions
from pathlib import Path

import pytest
import yaml

from areal.config.experiment import GRPOConfig, build_config
from areal.config.presets import PRESETS
from areal.errors import ConfigError
from areal.recipe import find_config_class, load_recipe
from areal_launch.commands.builtin_recipes import find_recipe

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
SETTINGS = sorted(EXAMPLES.glob("*.yaml"))
COMMAND = re.compile(r"\bareal (?:run|eval) [^`\n]*")
# Those of the plan: one of them has only settings, for another one's recipe.
NAMES = (
    "arithmetic_models",
    *("arithmetic_grpo", "gsm8k_grpo", "gsm8k_sft", "ppo_critic", "dpo", "reward_model", "distill"),
    *("lora_grpo", "clevr_count", "tldr", "reasoning_gym", "eval_only", "multi_turn_math"),
    *("tool_calculator", "openai_agent", "openai_agents_sdk", "anthropic_agent", "search_agent"),
    *("code_rl", "guess_number", "on_policy_distill", "outside_agents", "own_loss"),
)


def text_of(page: Path) -> str:
    """A page, a file's docstring, or the comment above settings; continued lines joined."""
    text = page.read_text()
    if page.suffix == ".py":
        text = ast.get_docstring(ast.parse(text)) or ""
    elif page.suffix == ".yaml":
        text = "\n".join(re.findall(r"^#(.*)$", text, re.MULTILINE))
    return re.sub(r"\\\n\s*", "", text)


def commands(page: Path) -> list[list[str]]:
    """The arguments of each `areal run examples/…` and `areal eval …` in it."""
    found = [
        shlex.split(line, comments=True)[1:]
        for line in COMMAND.findall(text_of(page))
        if "[" not in line  # a synopsis
    ]
    return [each for each in found if each[1:] and (each[0] == "eval" or "examples/" in each[1])]


def recipe_of(settings: Path) -> Path:
    """Beside it; or the one that its first line gives it to."""
    own = settings.with_suffix(".py")
    return own if own.exists() else ROOT / commands(settings)[0][1]


def can_be_read(recipe: Path) -> bool:
    """Whether what it imports at its top is installed (make test-agents-sdk)."""
    # Not by the module's name: a folder of tests is called `agents`, too.
    found = any(distributions(name="openai-agents"))
    return recipe.stem != "openai_agents_sdk" or found


@cache
def schema_of(recipe: Path) -> type[GRPOConfig]:
    if not can_be_read(recipe):
        pytest.skip("needs openai-agents: make test-agents-sdk")
    return find_config_class(load_recipe(recipe.read_bytes(), str(recipe)), GRPOConfig)


def leaves(settings: dict[str, object], prefix: str = "") -> list[str]:
    """`actor.optimizer.lr`, …"""
    found = []
    for key, value in settings.items():
        if isinstance(value, dict) and value:
            found += leaves(value, f"{prefix}{key}.")
        else:
            found.append(prefix + key)
    return found


def mistyped(key: str) -> str:
    """Its last two different neighbors, exchanged."""
    for i in range(len(key) - 2, 0, -1):
        if key[i] != key[i + 1] and "." not in key[i : i + 2]:
            return key[:i] + key[i + 1] + key[i] + key[i + 2 :]
    return key + "s"


def test_examples_when_listed_then_each_is_there_and_its_readme_has_its_line() -> None:
    assert {file.stem for file in SETTINGS} == set(NAMES)
    named = {Path(part).stem for line in commands(EXAMPLES / "README.md") for part in line[1:]}
    assert set(NAMES) - {"eval_only"} <= named
    for name in NAMES:
        assert commands(recipe_of(EXAMPLES / f"{name}.yaml")), f"{name}: no line to start it"


@pytest.mark.parametrize(
    "page",
    [
        page
        for page in (
            *sorted(EXAMPLES.iterdir()),
            ROOT / "README.md",
            *sorted((ROOT / "docs").glob("*.md")),
        )
        # The learning page's are made from rows that have a test of their own.
        if page.is_file() and page.name != "learning.md" and commands(page)
    ],
    ids=lambda page: page.name,
)
def test_page_when_it_says_how_to_start_an_example_then_its_files_and_keys_exist(page) -> None:
    for verb, *arguments in commands(page):
        options = [i for i, each in enumerate(arguments) if each.startswith("--")]
        config = [Path(arguments[i + 1]) for i in options if arguments[i] == "--config"]
        rest = [
            each
            for i, each in enumerate(arguments)
            if not each.startswith("--") and i - 1 not in options
        ]
        overrides = [each for each in rest if "=" in each]
        if verb == "eval":
            recipe, overrides = find_recipe(Path("trainer.type=null"), overrides)
        else:
            recipe = ROOT / rest[0]
        if page.name == "README.md" and not can_be_read(recipe):
            continue
        file = ROOT / config[0] if config else recipe.with_suffix(".yaml")
        build_config(schema_of(recipe), file, overrides)


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda file: file.stem)
def test_settings_when_a_key_is_mistyped_then_the_nearest_is_named(
    settings: Path, step: int
) -> None:
    schema = schema_of(recipe_of(settings))
    known = yaml.safe_load(settings.read_text())
    for item in fields(schema):
        if str(item.type).startswith("dict") and item.name in known:
            known[item.name] = None  # its keys are free
    keys = [key for key in leaves(known) if len(key) > 2]
    assert len(keys) > 5
    for key in keys[::step]:
        with pytest.raises(ConfigError) as caught:
            build_config(schema, settings, [f"{mistyped(key)}=1"])
        assert f"did you mean {key!r}" in str(caught.value), mistyped(key)


@pytest.mark.parametrize("algorithm", PRESETS)
def test_algorithm_when_mistyped_then_the_nearest_is_named(algorithm: str) -> None:
    with pytest.raises(ConfigError, match=f"did you mean '{algorithm}'"):
        build_config(GRPOConfig, None, [f"algorithm={mistyped(algorithm)}"])
