"""`areal-trainer --config FILE`, alone or once per rank under torchrun."""

from areal_trainer.server import main

if __name__ == "__main__":
    main()
