"""Reward functions that ship with the library."""
