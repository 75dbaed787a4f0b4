"""Engines: what generates, and what trains."""
