"""`areal-sandbox`, and `python -m areal_sandbox`."""

from areal_sandbox.server import main

if __name__ == "__main__":
    main()
