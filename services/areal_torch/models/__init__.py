"""Reads model folders, and creates small models."""
