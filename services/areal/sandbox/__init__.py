"""Runs code that a model wrote: in namespaces of its own, without a network, within limits."""

from areal.protocol.boxes import Limits, Outcome
from areal.sandbox.pool import Sandbox

__all__ = ["Limits", "Outcome", "Sandbox"]
