"""Agents as they are: what they call, recorded token by token, and what is trained of it."""
