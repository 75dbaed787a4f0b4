"""The buffer: owns tasks, leases, groups, batches and recipes, all in Redis.

It never generates, scores or trains, and keeps no state of its own: any number of replicas.

Core: `ledger.py`
"""
