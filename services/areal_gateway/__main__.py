"""`areal-gateway`, and `python -m areal_gateway`."""

from areal.chassis.collector import collector_paused

with collector_paused():
    from areal_gateway.server import main

if __name__ == "__main__":
    main()
