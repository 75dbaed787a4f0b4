"""Measures the trainer on a GPU; in miniature it runs on a CPU (`python -m tools.gpu --help`)."""
