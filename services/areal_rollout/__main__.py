"""`areal-rollout`, and `python -m areal_rollout`."""

from areal.chassis.collector import collector_paused

with collector_paused():
    from areal_rollout.server import main

if __name__ == "__main__":
    main()
