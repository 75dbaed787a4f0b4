"""What models write when asked for code: right programs score, wrong and hostile ones never do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.integration.test_sandbox import REASON

from areal.rewards.code import code_reward, run_tests
from areal.sandbox import Limits, Sandbox

pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON or "boxes work")
CORPUS = yaml.safe_load(
    (Path(__file__).parents[1] / "data" / "code_corpus.yaml").read_text(encoding="utf-8")
)
KINDS = {"right": 60, "wrong": 60, "attacks": 40}
# Four of each that end soon: the whole corpus has loops and programs that wait.
SAMPLE = {"right": (0, 13, 17, 35), "wrong": (0, 5, 6, 20), "attacks": (0, 1, 7, 23)}


@pytest.fixture
async def sandbox() -> AsyncIterator[Sandbox]:
    made = Sandbox(slots=2)
    yield made
    await made.close()


async def misjudged(sandbox: Sandbox, kind: str, rows: list[dict[str, Any]]) -> list[Any]:
    # Right ones have time on a busy machine; of the others some loop until their time is over.
    limits = Limits(seconds=60 if kind == "right" else 5)
    scores = await asyncio.gather(
        *(
            code_reward(
                sandbox,
                row["code"],
                CORPUS["tasks"][row["task"]],
                stdin=row.get("stdin", ""),
                limits=limits,
            )
            for row in rows
        )
    )
    return [
        row
        for row, score in zip(rows, scores, strict=True)
        if score != (1.0 if kind == "right" else 0.0)
    ]


@pytest.mark.parametrize("kind", KINDS)
async def test_score_when_a_sample_of_the_corpus_is_judged_then_only_right_ones_pass(sandbox, kind):
    assert await misjudged(sandbox, kind, [CORPUS[kind][n] for n in SAMPLE[kind]]) == []


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", KINDS)
async def test_score_when_the_whole_corpus_is_judged_then_only_right_ones_pass(sandbox, kind):
    assert len(CORPUS[kind]) == KINDS[kind]
    assert await misjudged(sandbox, kind, CORPUS[kind]) == []


HALF = "def half(x):\n    return x / 2\n"
PASS = {
    "its input is empty": ("import sys\nread = sys.stdin.read()", "assert read == ''"),
    "numbers are exact": (
        "import decimal, fractions\ndef same(x): return x\n",
        "import decimal, fractions, math\n"
        "for x in (10 ** 400, -0.0, 1e-320, math.inf, 1 + 2j, True, decimal.Decimal('1.10'),\n"
        "          fractions.Fraction(1, 3)):\n"
        "    assert same(x) == x and type(same(x)) is type(x) and repr(same(x)) == repr(x)\n"
        "assert math.isnan(same(math.nan)) and [*same(range(3))] == [0, 1, 2]",
    ),
    "an object keeps its identity": (
        "class One:\n    made = None\n    def __new__(cls):\n"
        "        cls.made = cls.made or super().__new__(cls)\n        return cls.made\n"
        "def first(x): return x[0]",
        "assert One() is One()\nrow = [1]\nassert first([row, 2]) is row",
    ),
    "a list contains itself": (
        "def loop(x):\n    x.append(x)\n    return x",
        "row = []\nassert loop(row) is row and row[0] is row",
    ),
    "an exception is its own": (
        "class Bad(ValueError):\n    def __init__(self, code):\n"
        "        super().__init__('bad')\n        self.code = code\n"
        "def fail(): raise Bad(3)",
        "try:\n    fail()\nexcept Bad as error:\n"
        "    assert error.code == 3 and str(error) == 'bad'\n"
        "else:\n    assert False",
    ),
    "an object of the tests is passed": (
        "def grow(box):\n    box.size += 1\n    box.add(box.size)\n    return box",
        "class Box:\n    size = 1\n    def add(self, x): self.got = x\n"
        "box = Box()\nassert grow(box) is box and box.size == 2 == box.got",
    ),
    "a module that the code imports is used": (
        "import math\nimport re as regex\ndef area(r): return math.pi * r ** 2",
        "assert math.isclose(area(1), math.pi)",
    ),
    "an iterator ends": (
        "def pairs():\n    yield from [(1, 'a'), (2, 'b')]",
        "assert dict(pairs()) == {1: 'a', 2: 'b'}\nit = pairs()\nnext(it), next(it)\n"
        "assert next(it, None) is None",
    ),
    "a context is entered": (
        "import contextlib\n@contextlib.contextmanager\ndef opened(log):\n"
        "    log.append('in')\n    yield 7\n    log.append('out')",
        "log = []\nwith opened(log) as x:\n    assert x == 7\n",
    ),
    "a value is an enum": (
        "import enum\nclass Color(enum.Enum):\n    RED = 1\ndef pick(): return Color.RED",
        "assert pick() is Color.RED and pick() == Color(1) and pick().name == 'RED'",
    ),
    "a class of pytest has the tests": (
        HALF,
        "class TestHalf:\n    def test_even(self):\n        assert half(2) == 1",
    ),
}
FAIL = {
    "a function of pytest has the tests": (HALF, "def test_half():\n    assert half(2) == 2"),
    "a class of pytest has the tests": (
        HALF,
        "class TestHalf:\n    def test_even(self):\n        assert half(2) == 2",
    ),
    "a class of unittest has the tests": (
        HALF,
        "import unittest\nclass T(unittest.TestCase):\n"
        "    def test(self): self.assertEqual(half(2), 2)",
    ),
    "the tests have something of the name main": (
        HALF,
        "class App:\n    main = 1\ndef test_half():\n    assert half(2) == 2 * App.main",
    ),
    "unittest does not exit": (
        HALF,
        "import unittest\nclass T(unittest.TestCase):\n"
        "    def test(self): self.assertEqual(half(2), 2)\nunittest.main(exit=False)",
    ),
    "an assertion is about a mean": (HALF, "assert abs(half(3) - 1.4) < 0.05"),
    "the code ends a loop of the tests": (
        "def half(x):\n    raise StopIteration",
        "for got, right in zip(map(half, [2, 4]), [1, 2]):\n    assert got == right",
    ),
    "the code ends all()": (
        "def half(x):\n    raise StopIteration",
        "assert all(map(lambda x: half(x) == x / 2, [2, 4]))",
    ),
    "the code exits inside unittest": (
        "def half(x):\n    raise SystemExit(0)",
        "import unittest\nclass T(unittest.TestCase):\n"
        "    def test(self): self.assertEqual(half(2), 1)\nunittest.main()",
    ),
    "the tests take any exception": (
        "import os\ndef half(x):\n    os._exit(0)",
        "try:\n    half('x')\nexcept BaseException:\n    pass",
    ),
    "equal to all contains all": (
        "class Every:\n    def __contains__(self, x): return True\n    def __iter__(self):\n"
        "        return iter([self])\n    def __eq__(self, o): return True\n"
        "def half(x): return Every()",
        "assert 1 in half(2)",
    ),
    "a subclass compares itself": (
        "class S(str):\n    def __eq__(self, o): return True\n    __hash__ = str.__hash__\n"
        "def half(x): return {'a': [S('no')]}",
        "assert half(2) == {'a': ['yes']}",
    ),
    "a text shows the tests' names": (
        "def half(tests):\n    return tests.test.__globals__['SECRET']",
        "SECRET = 4\nclass Box:\n    def test(self): pass\nassert half(Box()) == SECRET",
    ),
    "a generator shows the tests' names": (
        "def half(tests):\n    return tests.gi_frame.f_globals['SECRET']",
        "SECRET = 4\nassert half(x for x in [1]) == SECRET",
    ),
    "a format shows the tests' names": (
        "def half(box):\n    return int('{0.__class__.test.__globals__[SECRET]}'.format(box))",
        "SECRET = 4\nclass Box:\n    def test(self): pass\nassert half(Box()) == SECRET",
    ),
    "its memory has the tests": (
        "import re\nfound = b''\n"
        "for line in open('/proc/self/maps'):\n"
        "    where, rights, *rest = line.split()\n"
        "    if 'rw' in rights and 'vvar' not in line:\n"
        "        a, b = (int(each, 16) for each in where.split('-'))\n"
        "        with open('/proc/self/mem', 'rb', 0) as file:\n"
        "            file.seek(a)\n            found += file.read(b - a)\n"
        "def half(x):\n"
        "    return int(re.search(rb'SECRET = (' + rb'[0-9]+)', found)[1])",
        "SECRET = 73517351\nassert half(2) == SECRET",
    ),
}


@pytest.mark.parametrize("name", PASS)
async def test_tests_when_code_is_right_then_they_pass(sandbox, name):
    outcome, passed = await run_tests(sandbox, *PASS[name], Limits(seconds=60))
    assert passed, outcome.stderr


@pytest.mark.parametrize("name", FAIL)
async def test_tests_when_code_is_wrong_or_cheats_then_they_fail(sandbox, name):
    outcome, passed = await run_tests(sandbox, *FAIL[name], Limits(seconds=60))
    assert not passed
    assert outcome.stderr


async def test_outcome_when_tests_fail_then_it_has_the_exception_and_what_was_printed(sandbox):
    code = "def half(x):\n    print('halving', x)\n    return x"
    outcome, passed = await run_tests(sandbox, code, "assert half(2) == 1", Limits(seconds=60))
    assert not passed
    assert outcome.stdout == ""
    assert "halving 2" in outcome.stderr
    assert "assert half(2) == 1" in outcome.stderr


@pytest.mark.parametrize(
    "code",
    ["half = 1\0", "half = '\ud800", "(" * 100_000, "x = " + "-" * 100_000, "\ufeff", "\f"],
    ids=["NUL", "surrogate", "parentheses", "signs", "BOM", "spaces"],
)
async def test_score_when_code_is_no_python_then_it_is_0(sandbox, code):
    assert await code_reward(sandbox, code, "assert half(2) == 1", limits=Limits(seconds=60)) == 0.0
