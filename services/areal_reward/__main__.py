"""`areal-reward`, and `python -m areal_reward`."""

from areal.chassis.collector import collector_paused

with collector_paused():
    from areal_reward.server import main

if __name__ == "__main__":
    main()
