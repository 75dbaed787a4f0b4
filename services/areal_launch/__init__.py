"""The `areal` command: starts, shows and ends stacks, here and on clusters."""
