"""Runs code that a model wrote: in namespaces of its own, without a network, within limits."""

from areal.rewards.sandbox.box import Limits, Outcome, Sandbox

__all__ = ["Limits", "Outcome", "Sandbox"]
