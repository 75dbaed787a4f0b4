"""Which of a model's tensors stay in float32 when the model computes in 16 bits.

transformers lists some for each family: routers, and the biases that balance experts, of which a
rounded one chooses other experts. To them come the decays of recurrent layers' states and the
delta rules' norms: a state is multiplied by its decay at every token, so an error of rounding
grows with the sequence. Servers keep the same tensors in float32.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from areal_torch.engines.model.guards import decoder_of
from areal_torch.engines.model.recurrent import float32_names, modules_of

_BALANCE = "e_score_correction_bias"  # some families' lists lack it
_HALVES = (torch.bfloat16, torch.float16)


def float32_tensors(hf: Any) -> set[str]:
    """Returns the names of parameters and buffers that 16 bits do not suffice for.

    Args:
        hf: transformers model, with or without adapters.
    """
    names = set(hf.state_dict(keep_vars=True))
    # As transformers reads the list, whose entries are parts of names with `*` for anything.
    listed = [part.replace("*", ".*") for part in hf._keep_in_fp32_modules_strict or ()]
    listed.append(_BALANCE)
    plain = {name: name.replace(".base_layer.", ".") for name in names}
    found = {name for name in names if any(re.search(part, plain[name]) for part in listed)}
    decoder = decoder_of(hf)
    prefixes = {id(module): name for name, module in hf.named_modules()}
    for _, module in modules_of(decoder):
        found |= {f"{prefixes[id(module)]}.{name}" for name in float32_names(module)}
    return {name for name in found & names if ".lora_" not in name}


def widen(hf: Any, dtype: torch.dtype) -> None:
    """Gives those tensors of a model on the meta device float32, if it has 16 bits.

    Args:
        hf: transformers model.
        dtype: Of its parameters.
    """
    if dtype not in _HALVES:
        return
    for name in float32_tensors(hf):
        path, _, own = name.rpartition(".")
        module = hf.get_submodule(path)
        if (parameter := module._parameters.get(own)) is not None:
            module._parameters[own] = nn.Parameter(parameter.float(), parameter.requires_grad)
        elif (buffer := module._buffers[own]) is not None and buffer.is_floating_point():
            module._buffers[own] = buffer.float()
