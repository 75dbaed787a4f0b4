"""What `selective` keeps: products that cost more than to read their result."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from areal_torch.engines.parallel import memory


class Products(TorchDispatchMode):
    """Counts products by how many terms an element adds up."""

    def __init__(self) -> None:
        super().__init__()
        self.terms = Counter[int]()

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if operator in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            rows = args[1 if operator is torch.ops.aten.addmm.default else 0]
            self.terms[rows.shape[-1]] += 1
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize("bias", [False, True])
def test_selective_when_a_product_is_an_adapters_second_one_then_only_that_is_computed_again(
    bias: bool,
) -> None:
    base = torch.nn.Linear(768, 640, bias=bias).requires_grad_(False)
    down, up = torch.nn.Linear(768, 8, bias=False), torch.nn.Linear(8, 640, bias=bias)

    def layer(x: torch.Tensor) -> torch.Tensor:
        return (base(x) + up(down(x))).square()

    rows = torch.randn(5, 768, requires_grad=True)
    contexts = partial(create_selective_checkpoint_contexts, memory._policy)
    with Products() as first:
        out = checkpoint(layer, rows, use_reentrant=False, context_fn=contexts)
    assert first.terms == {768: 2, 8: 1}
    with Products() as again:
        out.sum().backward()
    # Gradients add up 5 rows, or the 640 or 8 elements of a row.
    assert again.terms[768] == 0
    plain = layer(rows.detach().requires_grad_())
    with Products() as gradients:
        plain.sum().backward()
    assert again.terms[8] == gradients.terms[8] + 1
