"""docs/api.md is what its generator writes, and leaves no public name out."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import areal
from areal.rewards import BUILTIN

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import gen_api  # noqa: E402


def test_reference_when_generated_again_then_it_is_the_committed_one() -> None:
    assert gen_api.page() == (ROOT / "docs" / "api.md").read_text(), "make docs"


def test_reference_when_read_then_every_public_name_has_an_entry_with_text() -> None:
    entries = re.split(r"^### ", (ROOT / "docs" / "api.md").read_text(), flags=re.MULTILINE)[1:]
    texts = {entry.splitlines()[0]: entry.split("\n", 1)[1] for entry in entries}
    assert {*areal.__all__, *(each.function for each in BUILTIN.values())} <= set(texts)
    for name, text in texts.items():
        prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL).strip()
        assert len(prose) > 10, name


def test_reference_when_a_public_name_has_no_docstring_then_it_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bare = tmp_path / "bare.py"
    bare.write_text("def reward(completion: str) -> float:\n    return 1.0\n")
    monkeypatch.setattr(gen_api, "source_of", lambda module: bare)
    with pytest.raises(SystemExit, match=r"bare\.reward: a public name without a docstring"):
        list(gen_api.page_of(gen_api.Public("reward", "bare")))
