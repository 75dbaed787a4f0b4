"""Runs tests against code that a model wrote, each in a process of its own, inside one box."""
