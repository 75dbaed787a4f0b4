"""Lends boxes in which code runs that no one trusts, each for a time.

Owns: the boxes and what is in them; nothing durable: they end with the process.
Never: runs a program outside a box, or in a weaker one than it was asked for.

Core: `leases.py`
"""
