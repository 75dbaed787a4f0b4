"""How a process learns the name that its launcher gave it."""

PROCESS_VARIABLE = "AREAL_PROCESS"
"""Holds the process's name within its stack, e.g. `rollout`; the chart and Compose set it too."""
