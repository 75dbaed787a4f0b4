"""Muon for the matrices of the layers, AdamW for everything else.

Muon (Jordan et al., 2024, https://kellerjordan.github.io/posts/muon) replaces the update of a
matrix by the nearest matrix with orthogonal rows or columns, so that directions which gradients
seldom have move as far as common ones:

    B <- m B + (1 - m) G              momentum, the only state: 4 bytes per parameter, not 8
    O <- NS5(m B + (1 - m) G)         Nesterov, then five Newton-Schulz iterations
    W <- W - lr (weight_decay W + 0.2 sqrt(max(rows, columns)) O)

The factor 0.2 sqrt(max(rows, columns)) makes updates as large as AdamW's usually are (Liu et al.,
2025, arXiv:2502.16982, section 2.2), so `lr` and `weight_decay` mean what they mean for AdamW.
torch.optim.Muon with `adjust_lr_fn="match_rms_adamw"` computes the same, but it takes neither
experts that are one tensor, nor a divisor of gradients, nor a step that the device skips.

An orthogonal matrix needs the whole matrix. Each rank gathers one at a time and computes it, which
costs all of them the same: about 15 products of the matrix with its square side. Experts that are
sharded as whole matrices are not gathered.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

MOMENTUM = 0.95
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5
_SMALLEST = 1e-7


class MuonAdamW(torch.optim.AdamW):
    """Groups with `muon=True` hold matrices [..., rows, columns]; AdamW updates the others.

    Its state comes from `optimizer.make_state`. A matrix's gradient is used up by the step.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """See torch.optim.AdamW; `closure` is not supported."""
        assert closure is None
        for group in self.param_groups:
            for matrix in group["params"] if group["muon"] else ():
                if matrix.grad is not None:
                    self._step_matrix(matrix, group["lr"], group["weight_decay"])
                    matrix.grad = None  # AdamW passes over it
        super().step()

    def _step_matrix(self, matrix: Tensor, lr: float, weight_decay: float) -> None:
        weight, gradient, momentum = map(
            _local, (matrix, matrix.grad, self.state[matrix]["momentum_buffer"])
        )
        rate: Any = lr
        divisor = getattr(self, "grad_scale", None)
        if divisor is not None:
            gradient = gradient / divisor
        if (skip := getattr(self, "found_inf", None)) is not None:
            # The host does not know yet. Nothing changes, and nothing that is not finite is read.
            gradient = torch.where(skip > 0, momentum, gradient)
            rate = lr * (1 - skip)
        momentum.lerp_(gradient, 1 - MOMENTUM)
        direction = _orthogonalized(gradient.lerp(momentum, MOMENTUM), matrix)
        weight.mul_(1 - rate * weight_decay)
        weight.sub_(direction.to(weight.dtype) * (rate * 0.2 * math.sqrt(max(matrix.shape[-2:]))))


def orthogonal(matrix: Tensor) -> Tensor:
    """Returns about the nearest matrix with orthogonal rows, or columns if they are fewer.

    Args:
        matrix: [..., rows, columns].

    Returns:
        Its singular vectors, with singular values from about 0.7 to 1.2; in bfloat16 on a GPU.
    """
    x: Tensor = matrix.bfloat16() if matrix.device.type == "cuda" else matrix
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=_SMALLEST)
    a, b, c = _COEFFICIENTS
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


def _orthogonalized(update: Tensor, matrix: Tensor) -> Tensor:
    """Returns this rank's part of the orthogonal matrix of an update whose part is given."""
    if not isinstance(matrix, DTensor) or _holds_whole_matrices(matrix):
        return orthogonal(update)
    mesh, places = matrix.device_mesh, matrix.placements
    spread = DTensor.from_local(
        update, mesh, places, run_check=False, shape=matrix.shape, stride=matrix.stride()
    )
    whole = orthogonal(spread.full_tensor())
    everywhere = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return _local(everywhere.redistribute(mesh, places))


def _holds_whole_matrices(matrix: DTensor) -> bool:
    stacked = matrix.ndim > 2
    return all(
        place.is_replicate() or (stacked and type(place) is Shard and place.dim == 0)
        for place in matrix.placements
    )


def _local(tensor: Any) -> Tensor:
    local: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local
