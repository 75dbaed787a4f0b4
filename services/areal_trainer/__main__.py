"""`areal-trainer`, and `python -m areal_trainer`."""

from areal.chassis.collector import collector_paused

with collector_paused():
    from areal_trainer.server import main

if __name__ == "__main__":
    main()
