"""Scores completions in worker processes with limits on time and memory.

Owns: the worker processes and the queue before them; nothing durable.
Never: turns a failure into a reward, or runs a reward function inside the service's own process.

Core: `pool.py`
"""
