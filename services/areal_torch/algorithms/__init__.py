"""Pure numerics of training: packing, normalization, advantages, losses.

Functions of tensors without models, processes or services.
The batch they share is described in `areal_torch.algorithms.packing`.
"""
