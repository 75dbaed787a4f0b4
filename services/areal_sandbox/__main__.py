"""`areal-sandbox`, and `python -m areal_sandbox`."""

from areal.chassis.collector import collector_paused

with collector_paused():
    from areal_sandbox.server import main

if __name__ == "__main__":
    main()
