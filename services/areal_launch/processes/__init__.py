"""One process and its end: supervision, probes, logs, leftovers."""
