"""Pure numerics of training: packing, normalization, advantages, losses, sampling filters.

Functions of tensors (or, for filters, of lists of floats) without models, processes or services.
The batch they share is described in `areal.algorithms.packing`.
"""
