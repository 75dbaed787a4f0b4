"""Training with PyTorch FSDP2: the engine, packed attention, checkpoints."""
