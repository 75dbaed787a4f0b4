"""What a run needs, looked at before it starts."""
