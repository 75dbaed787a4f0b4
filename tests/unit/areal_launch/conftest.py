"""What tests of launchers share."""

from __future__ import annotations

import uuid

import pytest


@pytest.fixture
def stack_id() -> str:
    return f"test/{uuid.uuid4().hex}"
