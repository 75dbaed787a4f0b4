"""`areal-weight-sync`, and `python -m areal_weight_sync`."""

from areal.chassis.collector import collector_paused

with collector_paused():
    from areal_weight_sync.server import main

if __name__ == "__main__":
    main()
