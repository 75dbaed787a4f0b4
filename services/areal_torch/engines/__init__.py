"""Engines: one generates, the other trains."""
