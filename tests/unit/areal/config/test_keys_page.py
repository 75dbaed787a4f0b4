"""Every configuration key is explained: docs/adr/0015-configuration-keys.md."""

from __future__ import annotations

import re
from pathlib import Path

from areal.config.experiment import GRPOConfig, known_keys

PAGE = Path(__file__).resolve().parents[4] / "docs" / "configuration.md"


def leaves() -> list[str]:
    keys = known_keys(GRPOConfig)
    sections = {key.rpartition(".")[0] for key in keys}
    return [key for key in keys if key not in sections]


def test_keys_when_documented_then_the_page_has_each_of_them_and_no_other() -> None:
    documented = re.findall(r"^- \*\*`([a-z_0-9.]+)`\*\*", PAGE.read_text(), re.MULTILINE)
    assert sorted(documented) == sorted(leaves())
