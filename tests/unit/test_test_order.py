"""The order of test files, and the shares of the long tests."""

from __future__ import annotations

import json
import os
import subprocess
from argparse import ArgumentTypeError
from collections import Counter
from pathlib import Path

import pytest
from tests.plugins import order
from tests.plugins.order import commit, deal, page_of

ROOT = Path(__file__).resolve().parents[2]
UNITS = {f"test_{i}.py": ([f"test_{i}.py::a", f"test_{i}.py::b"], float(10 * i)) for i in range(9)}


def test_deal_when_shares_are_made_then_each_unit_is_in_one_and_they_weigh_alike() -> None:
    shares = deal(UNITS, 100.0)
    assert len(shares) == 4
    assert Counter(name for share in shares for name in share) == dict.fromkeys(UNITS, 1)
    weights = [sum(cost for _, cost in share.values()) for share in shares]
    assert max(weights) - min(weights) <= 20
    assert deal(dict(reversed(UNITS.items())), 100.0) == shares
    assert deal(UNITS, 1000.0) == [UNITS]


def test_page_when_a_share_is_chosen_then_it_says_what_runs_and_what_waits() -> None:
    lines = page_of(deal(UNITS, 200.0), 1).splitlines()
    assert lines[0] == "share 2 of 2, chosen by the commit's hash, runs:"
    ran = [line.strip() for line in lines if line.startswith("  ")]
    assert ran
    assert all(line.endswith(" (2)") for line in ran)
    (waits,) = (line for line in lines if line.startswith("not now"))
    assert waits.startswith("not now, share 1 (180 s): ")
    assert len(ran) + waits.count(".py") == len(UNITS)


@pytest.mark.parametrize("text", ["", "main", "HEAD", "a0a0", "g" * 40, "a" * 41])
def test_share_when_it_is_no_hash_then_refused_by_name(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match="expected a commit's hash"):
        commit(text)
    assert commit("f873f2e4") == "f873f2e4"


def run(pytester: pytest.Pytester, *arguments: str) -> list[str]:
    """Runs small files with the plugin; the tests in the order in which they ran."""
    result = pytester.runpytest_inprocess("-v", "-p", "no:xdist", *arguments)
    return [line.split()[0] for line in result.outlines if " PASSED" in line]


@pytest.fixture
def files(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """Three files: one short, one long as recorded, one with a long test."""
    durations = pytester.path / "durations.json"
    recorded = {"test_a.py": 1.0, "test_b.py": 9.0, "test_c.py::test_long": 50.0, "test_c.py": 2.0}
    durations.write_text(json.dumps(recorded))
    monkeypatch.setattr(order, "DURATIONS", durations)
    pytester.makeini("[pytest]\nmarkers = long: l\nasyncio_default_fixture_loop_scope = function")
    pytester.makeconftest(
        "from tests.plugins.order import Order\n"
        "def pytest_addoption(parser):\n"
        "    parser.addoption('--share', default='')\n"
        "def pytest_configure(config):\n"
        "    order = Order(config.getoption('--share'), 35.0, longest_first=True)\n"
        "    config.pluginmanager.register(order)\n"
    )
    pytester.makepyfile(
        test_a="def test_one(): pass\ndef test_two(): pass",
        test_b="def test_one(): pass",
        test_c="import pytest\ndef test_one(): pass\n@pytest.mark.long\ndef test_long(): pass",
    )
    return pytester


pytest_plugins = ["pytester"]


def test_files_when_their_seconds_are_recorded_then_the_longest_is_first(
    files: pytest.Pytester,
) -> None:
    assert run(files) == [
        *("test_c.py::test_one", "test_c.py::test_long", "test_b.py::test_one"),
        *("test_a.py::test_one", "test_a.py::test_two"),
    ]
    assert run(files, "-m", "not long")[0] == "test_b.py::test_one"


def test_shares_when_commits_differ_then_together_they_run_everything_once(
    files: pytest.Pytester,
) -> None:
    ran = [run(files, f"--share={commit}") for commit in ("a0", "a1")]
    assert sorted(ran[0] + ran[1]) == sorted(run(files))
    assert all(ran)
    assert run(files, "--share=a2") == ran[0]


def test_durations_when_read_then_their_files_exist() -> None:
    recorded = json.loads((ROOT / "tests" / "durations.json").read_text())
    gone = [node for node in recorded if not (ROOT / node.partition("::")[0]).exists()]
    assert not gone, "run: make durations"


def test_targets_when_compiled_code_is_not_kept_around_them_then_they_keep_it() -> None:
    """Hundreds of processes would compile our code, and each worker all test files."""
    shown = subprocess.run(
        ["make", "--eval", "shown:; @echo $${PYTHONDONTWRITEBYTECODE-kept}", "shown"],
        cwd=ROOT,
        # Without what a make that runs the tests tells its children.
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "MAKEFLAGS": "", "MAKELEVEL": "0"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert shown.stdout.strip() == "kept"
