"""`make e2e-compose` only: it builds images and takes minutes."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    named = any("compose" in Path(arg).parts for arg in config.args)
    return None if named else True
