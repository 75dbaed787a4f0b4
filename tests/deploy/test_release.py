"""One version, wherever it is written."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]


def test_version_when_released_then_package_chart_and_changelog_agree() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    chart = yaml.safe_load((ROOT / "charts/areal/Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (version, version)
    engine = (ROOT / "services/areal_inference/http_api/info.py").read_text()
    assert f'VERSION = "areal-inference-{version}"' in engine
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[:2] == ["Unreleased", version]


def test_changelog_when_read_then_an_entry_is_a_line_or_two() -> None:
    released = (ROOT / "CHANGELOG.md").read_text().partition("## [0.3.0]")[2]
    entries = re.findall(r"^- (.*(?:\n  .*)*)", released, re.MULTILINE)
    assert len(entries) > 40
    assert [entry for entry in entries if entry.count("\n") > 1] == []
