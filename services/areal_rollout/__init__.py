"""Runs episodes: leases tasks, generates, scores, hands finished groups in; and the task API.

Owns: the episodes running now; nothing durable.
Never: decides what may run or how stale it may be (the buffer does), or which server serves which
version (weight-sync does).

Core: `executor.py`
"""
