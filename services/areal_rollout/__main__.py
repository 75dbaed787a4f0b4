"""`areal-rollout`, and `python -m areal_rollout`."""

from areal_rollout.server import main

if __name__ == "__main__":
    main()
