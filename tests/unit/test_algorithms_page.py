"""docs/algorithms.md: what it says was checked has tests, and nothing of the family is missing."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from areal.config.presets import PRESETS

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import gen_algorithms  # noqa: E402

CHECKED = "\n".join(check.what for check in gen_algorithms.CHECKS)


def test_page_when_generated_again_then_it_is_the_committed_one() -> None:
    assert gen_algorithms.page() == (ROOT / "docs" / "algorithms.md").read_text(), "make docs"


@pytest.mark.parametrize("check", gen_algorithms.CHECKS, ids=lambda check: check.what[:40])
def test_check_when_it_names_tests_then_they_exist(check: gen_algorithms.Check) -> None:
    assert check.tests
    for file, name in (each.split("::") for each in check.tests):
        [path] = (ROOT / "tests" / "unit").rglob(f"test_{file}.py")
        assert re.search(rf"^def test_{name}", path.read_text(), re.MULTILINE), f"{file}::{name}"


@pytest.mark.parametrize("algorithm", PRESETS.values(), ids=lambda preset: preset.name)
def test_algorithm_when_it_can_be_chosen_then_a_check_names_it(algorithm) -> None:
    assert re.search(rf"(?<![\w.]){re.escape(algorithm.name)}(?![\w+])", CHECKED), algorithm.name


@pytest.mark.parametrize(
    "subject",
    [
        *("critic", "GAE", "clipped loss", "mean over tokens", "mean over sequences"),
        *("constant length", "k1, k2, k3", "KL in the token rewards", "KL in the loss"),
        *("entropy bonus", "masked and truncated behavior weights of tokens and of sequences"),
        *("recompute", "loglinear", "leave-one-out", "overlong penalty", "SFT", "Bradley-Terry"),
        *("DPO", "IPO", "SimPO", "distillation"),
    ],
)
def test_subject_when_it_is_of_the_family_then_a_check_names_it(subject: str) -> None:
    assert subject in CHECKED
