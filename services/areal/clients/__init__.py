"""Typed async clients, one per service, and connections to Redis and NATS."""
