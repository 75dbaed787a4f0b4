"""The model in training: loading, packed batches, checks, and Hub names."""
