"""Console entry point: `areal-reward` and `python -m areal_reward`."""

from __future__ import annotations


def main() -> None:
    """Runs the service until it is told to stop."""
    import os

    # Workers are started by fork and exec: gRPC need not prepare for a fork, nor warn of one.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
    from areal.chassis.service import run_service
    from areal_reward.server import build

    run_service("reward", build)


if __name__ == "__main__":
    main()
