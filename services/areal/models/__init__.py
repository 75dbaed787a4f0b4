"""Small models made on the spot."""
