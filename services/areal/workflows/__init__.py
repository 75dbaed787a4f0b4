"""Workflows: how an episode runs."""
