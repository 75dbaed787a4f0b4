"""Trains unchanged agents: records their model calls and makes trajectories of them."""
