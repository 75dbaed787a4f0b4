"""Logging, metrics and tracing shared by all services."""
