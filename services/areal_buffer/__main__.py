"""`areal-buffer`, and `python -m areal_buffer`."""

from areal.chassis.collector import collector_paused

with collector_paused():
    from areal_buffer.server import main

if __name__ == "__main__":
    main()
