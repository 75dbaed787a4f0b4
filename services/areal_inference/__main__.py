"""Console entry point: ``areal-inference`` and ``python -m areal_inference``."""

from areal_inference.cli import main

if __name__ == "__main__":
    main()
