"""Weights on their way out: Hugging Face folders and published versions."""
