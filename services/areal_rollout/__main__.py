"""Console entry point: `areal-rollout` and `python -m areal_rollout`."""

from __future__ import annotations


def main() -> None:
    """Runs the service until it is told to stop."""
    from areal.chassis.service import run_service
    from areal_rollout.server import build

    run_service("rollout", build)


if __name__ == "__main__":
    main()
