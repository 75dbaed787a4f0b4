"""Owns policy versions and inference-server membership: which server serves which version.

Never generates, never writes weights: the trainer publishes a folder, this service brings every
server to it, confirms it, and says so.

Core: `coordinator.py`
"""
