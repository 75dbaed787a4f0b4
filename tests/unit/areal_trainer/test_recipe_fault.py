"""Exceptions of a recipe that would come again after a restart end the run with their place."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from areal.errors import Unavailable
from areal.recipe import load_recipe
from areal_trainer.recipe_fault import fault_of_recipe


def raised_by(body: str, file: Path) -> Exception:
    source = f"import json, os\n\n\ndef main(argv):\n    {body}\n"
    file.write_text(source)
    module = load_recipe(source.encode(), str(file))
    with pytest.raises(Exception) as caught:
        module.main([])
    return caught.value


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("{}['oops']", "KeyError: 'oops'"),
        ("[][3]", "IndexError: list index out of range"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("undefined", "NameError: name 'undefined' is not defined"),
        ("import no_such_package", "ModuleNotFoundError: No module named 'no_such_package'"),
        ("assert argv, 'empty'", "AssertionError: empty"),
        ("json.loads('{')", "JSONDecodeError: "),
        ("raise RuntimeError('mine\\n  own')", "RuntimeError: mine own"),
        ("raise type('Odd', (Exception,), {})('x')", "Odd: x"),
        ("open('/no/such/file')", "FileNotFoundError: "),
        ("raise ExceptionGroup('both', [KeyError('a')])", "KeyError: 'a'"),
    ],
)
def test_fault_when_a_restart_would_say_the_same_then_one_line_with_its_place(
    tmp_path: Path, body: str, said: str
) -> None:
    file = tmp_path / "mine.py"
    line = fault_of_recipe(raised_by(body, file), file)
    assert line.startswith(said)
    assert "\n" not in line
    if "Group" not in body:  # an exception of a group may have no traceback
        assert line.endswith(f"({file}:5)")


@pytest.mark.parametrize(
    "body",
    [
        "from areal.errors import Unavailable; raise Unavailable('server is away')",
        "raise ConnectionResetError('reset')",
        "raise TimeoutError('late')",
        "raise MemoryError",
        "import torch; raise torch.OutOfMemoryError('of this GPU')",
        "os.makedirs('/proc/no/such')",  # raised by the library below
        "from areal.errors import Unavailable; "
        "raise ExceptionGroup('both', [KeyError('a'), Unavailable('away')])",
    ],
)
def test_fault_when_it_may_pass_then_the_trainer_is_started_again(
    tmp_path: Path, body: str
) -> None:
    file = tmp_path / "mine.py"
    assert fault_of_recipe(raised_by(body, file), file) == ""


def test_fault_when_it_was_never_raised_then_there_is_no_place(tmp_path: Path) -> None:
    assert fault_of_recipe(KeyError("a"), tmp_path / "mine.py") == "KeyError: 'a'"
    assert fault_of_recipe(Unavailable("a"), tmp_path / "mine.py") == ""
    assert fault_of_recipe(torch.OutOfMemoryError("a"), tmp_path / "mine.py") == ""
