"""The model: configuration, weights, the forward pass and its cache."""
