"""`areal-gateway`, and `python -m areal_gateway`."""

from areal_gateway.server import main

if __name__ == "__main__":
    main()
