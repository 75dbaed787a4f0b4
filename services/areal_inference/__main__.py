"""`areal-inference`, and `python -m areal_inference`."""

from areal_inference.server import main

if __name__ == "__main__":
    main()
