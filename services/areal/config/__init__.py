"""Configuration of a run: the experiment file, its services, its training."""
