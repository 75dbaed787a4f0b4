"""`make chaos` only: it takes minutes, so it is collected when it is named."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--json", action="store_true", help="print the report as one line of JSON")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    named = any("chaos" in Path(arg).parts for arg in config.args)
    return None if named else True
