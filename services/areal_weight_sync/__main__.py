"""`areal-weight-sync`."""

from __future__ import annotations

from areal.chassis.service import run_service
from areal_weight_sync.server import build


def main() -> None:
    """Runs the service until a signal."""
    run_service("weight-sync", build)


if __name__ == "__main__":
    main()
