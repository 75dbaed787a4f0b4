"""This machine's GPUs: which are the stack's, what torch makes of them, and what serves."""
