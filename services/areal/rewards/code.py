r"""Scores code that a model wrote by its tests. The code runs in a box (areal.rewards.sandbox).

    sandbox = Sandbox()

    async def reward(completion: str, tests: str) -> float:
        return await code_reward(sandbox, completion, tests)

The score is in the last line that the program prints, after a word that it cannot know before its
tests have ended. So code that ends the interpreter early (`os._exit(0)`) does not pass. Code and
tests share an interpreter, so code that looks for the tests on purpose can still cheat.
"""

from __future__ import annotations

import re
import secrets

from areal.rewards.sandbox import Limits, Outcome, Sandbox

_BLOCK = re.compile(r"```(?:python|py|python3)?[ \t]*\n(.*?)```", re.DOTALL)


async def code_reward(
    sandbox: Sandbox,
    completion: str,
    tests: str,
    *,
    prefix: str = "",
    limits: Limits | None = None,
) -> float:
    r"""Returns 1.0 if the completion's code and then the tests run to their end, else 0.0.

    Args:
        sandbox: Where the code and the tests run.
        completion: The model's text. Its last fenced block is the code; without one, all of it.
        tests: Python source, e.g. `assert double(2) == 4`; an exception is a failure.
        prefix: Source before the code, e.g. the prompt of a model that completes text.
        limits: What the program may use; None: the defaults of `Limits`.

    Raises:
        CannotStart: This machine cannot start a box.
    """
    outcome, passed = await run_tests(sandbox, prefix + final_code(completion), tests, limits)
    return float(passed and not outcome.cause)


async def run_tests(
    sandbox: Sandbox, code: str, tests: str, limits: Limits | None = None
) -> tuple[Outcome, bool]:
    """Returns how the code and then its tests ended, and whether they ran to their end."""
    word = secrets.token_hex(16)
    # Standard input holds the word, and is read after the tests.
    program = f"{code}\n\n{tests}\n\nimport sys as _sys\nprint('\\n' + _sys.stdin.read())\n"
    outcome = await sandbox.run(program, stdin=word, limits=limits)
    return outcome, outcome.exit_code == 0 and outcome.stdout.endswith(f"\n{word}\n")


def final_code(completion: str) -> str:
    """The last fenced block of Python, or all of the text."""
    blocks = _BLOCK.findall(completion)
    return str(blocks[-1]) if blocks else completion
