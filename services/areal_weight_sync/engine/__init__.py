"""What is asked of one inference server."""
