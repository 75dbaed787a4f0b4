"""A trainer process around its engine: sessions, checkpoints, publishing, status."""
