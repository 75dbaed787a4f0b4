"""`areal-inference`, and `python -m areal_inference`."""

from areal.chassis.collector import collector_paused

with collector_paused():
    from areal_inference.server import main

if __name__ == "__main__":
    main()
