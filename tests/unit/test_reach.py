"""Which tests a change reaches, and how many of them fit into a minute."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools.changed_tests import choose
from tools.reach import ROOT, Reach

FILES = {
    "services/areal/types.py": "X = 1",
    "services/areal/__init__.py": '_EXPORTS = {"GRPOConfig": "areal.config"}',
    "services/areal/config.py": "from areal.types import X",
    "services/areal_reward/__init__.py": "",
    "services/areal_reward/__main__.py": "from areal_reward import pool",
    "services/areal_reward/pool.py": 'SCRIPT = "lua/count.lua"\nSTART = "child.py"',
    "services/areal_reward/child.py": "print(1)",
    "services/areal_reward/lua/count.lua": "return 1",
    "charts/areal/values.yaml": "a: 1",
    "examples/sums.py": "from areal import GRPOConfig",
    "tests/conftest.py": "",
    "tests/unit/conftest.py": "import tests.helper",
    "tests/helper.py": "def f():\n    from areal.config import X",
    "tests/unit/test_types.py": "from areal.types import X",
    "tests/unit/test_public.py": "from areal import GRPOConfig",
    "tests/other/test_process.py": 'start("areal_reward")',
    "tests/other/test_chart.py": 'CHART = ROOT / "charts" / "areal"',
    "tests/other/test_example.py": 'run("sums.py")',
    "tests/other/test_alone.py": "import json",
}


@pytest.fixture(scope="module")
def reach(tmp_path_factory: pytest.TempPathFactory) -> Reach:
    """A small tree, read."""
    root = tmp_path_factory.mktemp("tree")
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    for place in ("services", "tests", "tools", "examples"):
        (root / place).mkdir(exist_ok=True)
    return Reach(root)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        # test_public: through config, and through the helper that conftest imports.
        ("services/areal/types.py", {"test_types.py": 1, "test_public.py": 2}),
        ("services/areal/config.py", {"test_public.py": 1, "test_types.py": 3}),
        ("services/areal_reward/pool.py", {"test_process.py": 2}),
        # A script that is started by the name of its file, and that no one imports.
        ("services/areal_reward/child.py", {"test_process.py": 3}),
        ("services/areal_reward/lua/count.lua", {"test_process.py": 3}),
        ("charts/areal/values.yaml", {"test_chart.py": 1}),
        ("examples/sums.py", {"test_example.py": 1}),
        ("tests/unit/test_types.py", {"test_types.py": 0}),
        ("tests/conftest.py", dict.fromkeys(
            ("test_types.py", "test_public.py", "test_process.py", "test_chart.py",
             "test_example.py", "test_alone.py"), 1)),
        ("docs/unknown.md", {}),
    ],
)  # fmt: skip
def test_reach_when_a_file_changes_then_tests_come_with_their_distance(
    reach: Reach, changed: str, expected: dict[str, int]
) -> None:
    found = reach.tests([Path(changed)])
    assert {file.name: steps for file, steps in found.items()} == expected
    assert list(found.values()) == sorted(found.values())


def test_reach_when_several_files_change_then_the_nearest_counts(reach: Reach) -> None:
    both = [Path("services/areal/types.py"), Path("services/areal/config.py")]
    found = {file.name: steps for file, steps in reach.tests(both).items()}
    assert found == {"test_types.py": 1, "test_public.py": 1}


def test_choose_when_not_all_fit_then_the_nearest_and_quickest_run() -> None:
    near, quick, slow, far = (ROOT / "tests" / f"test_{name}.py" for name in "abcd")
    seconds = {"tests/test_a.py": 30.0, "tests/test_b.py": 5.0, "tests/test_c.py": 50.0}
    distances = {far: 3, slow: 2, quick: 2, near: 1}  # the last one is not recorded: 2 s
    assert choose(distances, seconds, 60.0) == ([near, quick, far], [slow])
    assert choose({}, seconds) == ([], [])
