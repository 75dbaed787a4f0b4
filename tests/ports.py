"""Ports for servers that a test starts in a moment."""

from __future__ import annotations

from areal.launchers.ports import PortPicker


def free_port() -> int:
    """One that is free, and that no outgoing connection takes before its server has started."""
    return PortPicker().pick("")
