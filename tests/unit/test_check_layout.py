"""Services are laid out alike; whatever is not is reported."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tools.check_layout import MAIN, ROOT, check

TABLE = '"""The core.\n\n| loop | waits for | unblocked by |\n"""\n'
FILES = {
    "services/areal_two_words/__init__.py": '"""Owns nothing.\n\nCore: `core.py`\n"""\n',
    "services/areal_two_words/__main__.py": MAIN.format(
        command="two-words", package="areal_two_words"
    ),
    "services/areal_two_words/config.py": (
        "class TwoWordsConfig:\n    def from_experiment(cls): ...\n"
    ),
    "services/areal_two_words/metrics.py": "",
    "services/areal_two_words/server.py": (
        "class TwoWordsServer: ...\n\n\ndef main() -> None: ...\n"
    ),
    "services/areal_two_words/servicer.py": (
        "class TwoWordsService(pb_grpc.TwoWordsServiceServicer): ...\n"
    ),
    "services/areal_two_words/core.py": TABLE,
    "services/areal_two_words/README.md": "",
    "services/areal_two_words/lua/take.lua": "",
    "tests/unit/areal_two_words/test_core.py": "",
}
FOLDER = "services/areal_two_words"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A house with one service that keeps every rule."""
    for name, text in FILES.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path


def test_layout_when_read_then_this_house_keeps_it() -> None:
    assert check(ROOT) == []


def test_layout_when_every_rule_is_kept_then_nothing_is_said(root: Path) -> None:
    assert check(root) == []


def write(name: str, text: str) -> Callable[[Path], None]:
    def plant(root: Path) -> None:
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    return plant


def remove(name: str) -> Callable[[Path], None]:
    return lambda root: (root / name).unlink()


@pytest.mark.parametrize(
    ("plant", "said"),
    [
        *(
            (remove(f"{FOLDER}/{room}"), f"{room} is missing")
            for room in ("__main__.py", "config.py", "metrics.py", "server.py", "servicer.py")
        ),
        (remove(f"{FOLDER}/README.md"), "README.md is missing"),
        (write(f"{FOLDER}/__main__.py", "print()\n"), "__main__.py: expected"),
        (
            write(f"{FOLDER}/server.py", "class Process: ...\n\n\ndef main(): ...\n"),
            "expected a class TwoWordsServer",
        ),
        (write(f"{FOLDER}/server.py", "class TwoWordsServer: ...\n"), "expected a function main"),
        (
            write(f"{FOLDER}/config.py", "class Settings: ...\n"),
            "classes ['Settings'], expected TwoWordsConfig alone",
        ),
        (
            write(f"{FOLDER}/config.py", "class TwoWordsConfig: ...\n"),
            "expected TwoWordsConfig.from_experiment",
        ),
        (
            write(f"{FOLDER}/servicer.py", "class Servicer: ...\n"),
            "servicer.py: expected a class TwoWordsService",
        ),
        (
            write(f"{FOLDER}/servicer.py", "class TwoWordsService: ...\n"),
            "TwoWordsService is no TwoWordsServiceServicer",
        ),
        (write(f"{FOLDER}/take.lua", ""), "take.lua: Lua lies in lua/"),
        (write(f"{FOLDER}/__init__.py", '"""Owns nothing."""\n'), "expected a line: Core:"),
        (write(f"{FOLDER}/__init__.py", '"""A.\n\nCore: `gone.py`\n"""\n'), "gone.py is no file"),
        (write(f"{FOLDER}/core.py", TABLE + "import grpc\n"), "a core imports no grpc"),
        (
            write(f"{FOLDER}/core.py", TABLE + "from redis import asyncio\n"),
            "a core imports no redis",
        ),
        (write(f"{FOLDER}/core.py", '"""Waits."""\n'), "core.py: expected a table"),
        (write(f"{FOLDER}/long.py", "\n" * 601), "long.py: 601 lines, at most 600"),
        (write("tests/unit/areal_gone/test_it.py", ""), "areal_gone: no such package"),
        (remove("tests/unit/areal_two_words/test_core.py"), "no unit tests in"),
        (write("tests/deploy/test_core.py", ""), "test_core.py: pytest expects different names"),
    ],
)
def test_layout_when_a_rule_is_broken_then_it_is_said(
    root: Path, plant: Callable[[Path], None], said: str
) -> None:
    plant(root)
    problems = check(root)
    assert any(said in problem for problem in problems), problems


def test_layout_when_scripts_are_registered_without_their_folder_then_it_is_said(
    root: Path,
) -> None:
    write(f"{FOLDER}/store.py", "client.register_script(TEXT)\n")(root)
    assert check(root) == []
    (root / FOLDER / "lua" / "take.lua").unlink()
    (root / FOLDER / "lua").rmdir()
    assert check(root) == ["services/areal_two_words: it changes Redis, and has no lua/"]


def test_layout_when_an_exception_is_not_needed_any_more_then_it_is_said(root: Path) -> None:
    write("services/areal_gateway/servicer.py", "")(root)
    assert any("remove it from EXCEPTIONS" in problem for problem in check(root))
