"""The verbs of the `areal` command."""
