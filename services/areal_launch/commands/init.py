"""`areal init NAME`: a recipe folder to start from, made of one of the examples."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from areal.errors import InvalidInput, nearest
from areal.recipe_folder import is_utf8
from areal_launch.commands.builtin_recipes import find_example
from areal_launch.view.output import say

KINDS = {
    "rlvr": "arithmetic_grpo",
    "multi-turn": "multi_turn_math",
    "tool": "tool_calculator",
    "agent": "openai_agent",
    "sft": "gsm8k_sft",
    "own-loss": "own_loss",
}
"""Kind of recipe -> the example that it is made from."""
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


def write_recipe(folder: Path, kind: str) -> int:
    """Writes `folder`/recipe.py and recipe.yaml; returns the exit code.

    Raises:
        InvalidInput: There is no such kind, the folder has something in it, its name cannot be that
            of an experiment, or its path is not UTF-8.
    """
    if kind not in KINDS:
        raise InvalidInput(f"--kind {kind!r}: no such kind{nearest(kind, KINDS)}")
    if not is_utf8(str(folder)):
        raise InvalidInput(f"{str(folder)!r}: expected a path in UTF-8")
    name = folder.resolve().name
    if not _NAME.fullmatch(name):
        raise InvalidInput(
            f"{str(folder)!r}: its name becomes the experiment's: expected lower-case letters, "
            "digits and dashes"
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InvalidInput(f"{str(folder)!r}: exists already: expected a new or an empty folder")
    example = KINDS[kind]
    texts = {
        f"recipe{suffix}": find_example(f"{example}{suffix}").read_text("utf-8")
        for suffix in (".py", ".yaml")
    }
    # Quoted: YAML reads null, on, 1e5 and others as something else than a text.
    settings = re.sub(
        r"(?m)^experiment_name:.*$", f'experiment_name: "{name}"', texts["recipe.yaml"]
    )
    texts["recipe.yaml"] = settings.replace(f"{example}.py", "recipe.py")
    shown = shlex.quote(f"./{folder}" if str(folder).startswith("-") else str(folder))
    # A docstring cannot show every path; beside the folder, its name is enough.
    in_docstring = name if set(shown) & set('\\"') else shown
    texts["recipe.py"] = texts["recipe.py"].replace(f"examples/{example}.py", in_docstring)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in texts.items():
            (folder / file).write_text(text, "utf-8")
    except OSError as error:
        raise InvalidInput(f"{str(folder)!r}: {error.strerror}") from None
    say(f"{folder / 'recipe.py'}\n{folder / 'recipe.yaml'}")
    say(f"next: areal check {shown} && areal run {shown}")
    return 0
