"""Tensor and expert parallelism with transformers' own plan for an architecture.

A plan says for each projection whether its columns or its rows are spread, and for experts that
each rank has some of them whole and gets the tokens that are routed there. Embedding and head are
left out: FSDP shards them, and every rank of a tensor group computes the same logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from areal.errors import CannotStart, InvalidInput
from areal_torch.engines.model import lora
from areal_torch.engines.model.guards import decoder_of
from areal_torch.engines.parallel.mesh import Mesh
from areal_torch.engines.versions import PLANS_FROM, installed, older

_SUMMED = "replicated_with_grad_allreduce"
_EXPERTS = "ep_dispatch_experts"
_COMPUTED = frozenset({"colwise", "rowwise", _SUMMED})
"""Styles that tests have shown to train as one rank does."""


def spread_matrices(hf: Any, mesh: Mesh) -> None:
    """Spreads the layers' matrices over the tensor group.

    Raises:
        InvalidInput: The architecture has no plan, or one with a style that was never verified.
        CannotStart: transformers is too old to apply one.
    """
    _check_version("t", mesh)
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    plan = _plan_of(hf, "base_model_tp_plan", "t")
    styles = {name: style for name, style in _matching(hf, plan) if ".experts" not in name}
    if unknown := sorted(set(styles.values()) - _COMPUTED):
        raise InvalidInput(
            f"model {type(hf).__name__}: its tensor-parallel plan has {', '.join(unknown)}, which "
            "has not been shown to train correctly; expected a layout without t"
        )
    if mesh.experts is None and any(".experts" in name for name, _ in _matching(hf, plan)):
        raise InvalidInput(
            f"model {type(hf).__name__} has experts, which are not spread over a tensor group: "
            "expected e beside t, as in d4t2e8, or a layout without t"
        )
    names = dict(hf.named_modules())
    parts: dict[str, str] = {}
    for name, style in styles.items():
        parts |= lora.spread_parts(name, names[name], style)
    for name, style in parts.items():
        if style == _SUMMED:
            _sum_gradients(names[name], mesh.tensor)
    rest = {name: style for name, style in parts.items() if style != _SUMMED}
    # A plan names modules; what becomes of their parameters follows from it.
    own = {
        f"{name}.{parameter}": style
        for name, style in rest.items()
        for parameter, _ in names[name].named_parameters(recurse=False)
    }
    apply_tensor_parallelism(hf, mesh.tensor, {**own, **rest})


def spread_experts(hf: Any, mesh: Mesh) -> list[nn.Module]:
    """Spreads whole experts over the expert group; returns the modules that hold them.

    Raises:
        InvalidInput: The architecture has no plan for it.
        CannotStart: transformers is too old to apply one.
    """
    _check_version("e", mesh)
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    assert mesh.experts is not None
    plan = dict(_matching(hf, _plan_of(hf, "base_model_ep_plan", "e")))
    names = dict(hf.named_modules())
    found = [names[name] for name, style in plan.items() if style == _EXPERTS]
    if not found or set(plan.values()) - {_EXPERTS, "grouped_gemm"}:
        raise InvalidInput(
            f"model {type(hf).__name__}: its expert-parallel plan has "
            f"{', '.join(sorted(set(plan.values())))}; expected {_EXPERTS} and grouped_gemm"
        )
    # Parameters first: what sends tokens asks the module how many experts are left.
    plan = dict(sorted(plan.items(), key=lambda item: item[1] == _EXPERTS))
    apply_expert_parallelism(hf, mesh.experts, mesh.tensor, plan, "all_to_all")
    return found


def _check_version(letter: str, mesh: Mesh) -> None:
    # Before 5.23 the functions are in other modules, take other arguments, and know other styles.
    if older(found := installed("transformers"), PLANS_FROM):
        raise CannotStart(
            f"trainer layout '{mesh.layout}': {letter} needs transformers {PLANS_FROM}, and "
            f"{found} is installed; expected a layout without {letter}, or "
            f"pip install transformers=={PLANS_FROM}.0"
        )


def _plan_of(hf: Any, name: str, letter: str) -> dict[str, str]:
    plan: dict[str, str] | None = getattr(hf.config.get_text_config(), name, None)
    if not plan:
        raise InvalidInput(
            f"model {type(hf).__name__} has no {name} in transformers: expected a layout without "
            f"{letter}"
        )
    return plan


def _matching(hf: Any, plan: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yields (full name, style) of every module or parameter of the decoder that a plan names."""
    from transformers.distributed.parallel_utils import replace_layer_number_by_wildcard

    decoder = decoder_of(hf)
    base = next(name for name, module in hf.named_modules() if module is decoder)
    for name, _ in (*hf.named_modules(), *hf.named_parameters()):
        pattern = replace_layer_number_by_wildcard(name.removeprefix(f"{base}."))
        if pattern in plan:
            yield name, plan[pattern]


def _sum_gradients(module: nn.Module, mesh: DeviceMesh) -> None:
    """Adds up the gradients of a norm that each rank of the group applies to its own heads.

    transformers does it by a hook on the accumulated gradient, which would add up those of earlier
    micro-batches again, and which FSDP's parameters do not call.
    """
    from transformers.distributed.parallel_utils import _AllReduceBackward

    forward = module.forward

    def forward_summed(*args: Any, **kwargs: Any) -> Any:
        own = dict(module._parameters)
        summed: dict[str, Any] = {
            name: None if p is None else _AllReduceBackward.apply(p, mesh.get_group())
            for name, p in own.items()
        }
        module._parameters.update(summed)
        try:
            return forward(*args, **kwargs)
        finally:
            module._parameters.update(own)

    module.forward = forward_summed
