r"""Scores code that a model wrote by its tests. Both run in a box (areal.sandbox).

    sandbox = Sandbox()

    async def reward(completion: str, tests: str) -> float:
        return await code_reward(sandbox, completion, tests)

The code and its tests run in two processes (areal.rewards.code_tests): the code sees neither the
tests nor what they expect, only the arguments of calls, and the tests compare what it returns. At
their end the tests print a word that the process of the code cannot read. docs/isolation.md says
what tests can use of the code, and what a test cannot tell.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from areal.rewards import code_tests
from areal.rewards.boxed import after_thought
from areal.sandbox import Limits, Outcome, Sandbox

_FENCE = re.compile(
    r"(?P<indent>[ \t]*)(?P<item>(?:[-*+]|\d{1,3}[.)])[ \t]+)?(?P<fence>`{3,}|~{3,})"
    r"[ \t]*(?P<language>[^\s`]*)"
)
_PYTHON = ("py", "python", "python3", "python2", "py3")
_PROGRAM = """
import sys
del sys.path[0]  # what another program of the box wrote is not for the tests to import
for name, text in {sources!r}.items():
    module = sys.modules[name] = type(sys)(name)
    exec(compile(text, name, "exec"), module.__dict__)
module.main()
"""


async def code_reward(
    sandbox: Sandbox,
    completion: str,
    tests: str,
    *,
    prefix: str = "",
    stdin: str = "",
    limits: Limits | None = None,
) -> float:
    r"""Returns 1.0 if the completion's code and then the tests run to their end, else 0.0.

    Args:
        sandbox: Where the code and the tests run.
        completion: The model's text; `final_code` says which part of it is the code.
        tests: Python source, e.g. `assert double(2) == 4`; an exception is a failure. Functions
            `test…` without arguments and `unittest.TestCase`s that it defines but does not call
            run, too.
        prefix: Source before the code, e.g. the prompt of a model that completes text.
        stdin: What the code reads from standard input.
        limits: What the code and its tests may use together; None: the defaults of `Limits`.

    Raises:
        CannotStart: This machine cannot start a box.
    """
    code = prefix + final_code(completion)
    return float((await run_tests(sandbox, code, tests, limits, stdin=stdin))[1])


async def run_tests(
    sandbox: Sandbox, code: str, tests: str, limits: Limits | None = None, *, stdin: str = ""
) -> tuple[Outcome, bool]:
    """Returns how the code and then its tests ended, and whether they ran to their end.

    The outcome's stderr has what both printed, up to half of `limits.output_kb`, and the exception
    of a failure.
    """
    limits, word = limits or Limits(), secrets.token_hex(16)
    request = {"word": word, "code": code, "tests": tests, "stdin": stdin}
    outcome = await sandbox.run(
        _program(),
        stdin=json.dumps({**request, "room": limits.output_kb << 9}),
        limits=replace(limits, processes=limits.processes + 1),  # that of the tests
    )
    passed = not outcome.cause and outcome.exit_code == 0 and outcome.stdout == word
    return replace(outcome, stdout=""), passed


def final_code(completion: str) -> str:
    """Returns the last fenced block that is labeled as Python, else the last without a label.

    Without a block, it is all of the text. What is in a thought (``<think>``) does not count. A
    block without an end, as an answer has it that was cut off, extends to the end of the text. Its
    lines lose the indentation of its fence, as in an item of a list.
    """
    text = after_thought(completion)
    blocks = list(_blocks(text))
    plain = [code for language, code in blocks if not language]
    labeled = [code for language, code in blocks if language in _PYTHON]
    return [text, *plain, *labeled][-1]


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yields the language, in lower case, and the lines of each fenced block."""
    opening: re.Match[str] | None = None
    block: list[str] = []
    for line in text.splitlines(keepends=True):
        found = _FENCE.match(line)
        if opening is None:
            if found and "`" not in line[found.end("fence") :]:
                opening, block = found, []
        elif found and _closes(found, opening):
            yield opening["language"].lower(), "".join(block)
            opening = None
        else:
            indent = opening.start("fence")
            block.append(line[:indent].lstrip(" \t") + line[indent:])
    if opening and block:
        yield opening["language"].lower(), "".join(block)


def _closes(found: re.Match[str], opening: re.Match[str]) -> bool:
    alone = not found["item"] and not found["language"]
    return alone and found["fence"].startswith(opening["fence"])


def _program() -> str:
    """Returns the program for the box: the files of code_tests, which the box cannot read."""
    folder = Path(code_tests.__file__).parent
    sources = {
        f"{code_tests.__name__}.{name}": (folder / f"{name}.py").read_text(encoding="utf-8")
        for name in ("far", "values", "wire", "solution", "tests")
    }
    return _PROGRAM.format(sources=sources)
