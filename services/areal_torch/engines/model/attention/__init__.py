"""How attention is computed over packed sequences."""
