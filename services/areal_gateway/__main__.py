"""Console entry point: `areal-gateway` and `python -m areal_gateway`."""

from __future__ import annotations


def main() -> None:
    """Runs the service until it is told to stop."""
    from areal.chassis.service import run_service
    from areal_gateway.server import build

    run_service("gateway", build)


if __name__ == "__main__":
    main()
