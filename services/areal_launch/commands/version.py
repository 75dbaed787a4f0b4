"""`areal --version`: prints the installed version."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version


def version_line() -> str:
    """Returns the version of the installed distribution, and that of Python."""
    try:
        installed = version("areal-services")
    except PackageNotFoundError:  # a checkout on PYTHONPATH
        installed = "not installed (a checkout)"
    return f"areal-services {installed}, Python {platform.python_version()}"
