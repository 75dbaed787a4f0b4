"""`python -m areal_buffer`, console script `areal-buffer`."""

from areal.chassis.service import run_service
from areal_buffer.server import build


def main() -> None:
    """Serves until told to stop."""
    run_service("buffer", build)


if __name__ == "__main__":
    main()
