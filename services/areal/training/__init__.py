"""What a trainer process does around its engine: sessions, checkpoints, publishing, status."""
