"""The versions of torch and transformers with which the trainer works, stated once.

`tools/api_signatures.json` holds, for the oldest and the newest of them and some between, the
signatures of what this project calls; a test compares each call with them.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from areal.chassis.logging import get_logger
from areal.errors import CannotStart

SUPPORTED = {"torch": ("2.11", "2.14"), "transformers": ("5.17", "5.23")}
"""Oldest and newest minor version that is accepted and tested."""
PLANS_FROM = "5.23"
"""Oldest transformers whose tensor- and expert-parallel plans can be applied."""


def installed(package: str) -> str:
    """Returns the version of a package, or `none`."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def together() -> str:
    """Returns `torch 2.11.0+cu130, transformers 5.17.0`, for errors."""
    return ", ".join(f"{package} {installed(package)}" for package in SUPPORTED)


def accepted() -> str:
    """Returns `torch 2.11 to 2.14, transformers 5.17 to 5.23`, for errors."""
    return ", ".join(
        f"{package} {oldest} to {newest}" for package, (oldest, newest) in SUPPORTED.items()
    )


def check_versions() -> None:
    """Refuses versions that are too old; warns about newer ones, which no test has seen.

    Raises:
        CannotStart: A package is older than the oldest that is supported.
    """
    for package, (oldest, newest) in SUPPORTED.items():
        found = installed(package)
        if found == "none":  # without metadata; the import says whether it is there
            continue
        if older(found, oldest):
            raise CannotStart(f"{package} {found}: expected {oldest} to {newest} for the trainer")
        if older(newest, found):
            get_logger(__name__).warning(
                "version_not_tested", package=package, installed=found, tested=f"up to {newest}"
            )


def older(one: str, other: str) -> bool:
    """Whether a version is of an older minor release than another."""
    return _minor(one) < _minor(other)


def _minor(text: str) -> tuple[int, int]:
    major, minor = text.split(".")[:2]
    return int(major), int(minor)
