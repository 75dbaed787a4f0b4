"""What the charts' tests share."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import kubernetes_validate.utils
import pytest


@pytest.fixture(scope="session", autouse=True)
def schemas_read_once() -> Iterator[None]:
    """The library reads a file of 2 MB twice for every object."""
    with pytest.MonkeyPatch.context() as patch:
        utils = kubernetes_validate.utils
        patch.setattr(utils, "schema_contents", functools.cache(utils.schema_contents))
        yield
