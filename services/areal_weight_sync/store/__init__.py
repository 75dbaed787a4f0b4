"""What is kept: state in Redis, weights in a folder, served over HTTP."""
