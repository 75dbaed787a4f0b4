"""Measures the cost of a step: floating-point operations, time by phase, peak memory.

    MFU = ((4 N + 2 M + 6 S) T + (4 or 6) V T' + 6 layers heads head_dim sum of L^2)
          / (seconds x GPUs x peak FLOP/s)

N is the number of parameters that a token is multiplied with in the layers (only the experts it is
routed to; an embedding lookup does not count), M the number of those that are trained: all, or
LoRA's matrices. T is the tokens of the batch, L the length of each sequence. V is the number of
parameters of the head, T' the loss tokens: no other token reaches the head. A parameter costs 2
operations forward, 2 for the gradient of its input, and 2 for its own gradient if it is trained;
causal attention 2 x 2 x L^2 / 2 forward and twice that backward, in the layers that have attention,
as if none had a window or chunks.
S is the number of multiplications with the states of recurrent layers that one token costs forward
(`recurrent.state_products`); what their kernels add by computing in chunks is not counted. It
counts the model's operations, not the machine's: what is computed again (activations, logits) adds
to the time only, and a prefix that is computed once counts in each sequence that has it.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from areal_torch.engines.model.guards import decoder_of
from areal_torch.engines.model.layer_types import attention_layers
from areal_torch.engines.model.recurrent import modules_of, state_products

# Dense bfloat16, 10^12 a second, as the makers state it; the first name that is part of the GPU's.
_PEAK = (
    ("B300", 2250), ("B200", 2250), ("H20 ", 148), ("H100 PCIe", 756), ("H100 NVL", 835),
    ("H200", 989), ("H100", 989), ("H800", 989), ("GH200", 989), ("A100", 312), ("A800", 312),
    ("L40S", 362), ("L40", 181), ("L4", 121), ("RTX 6000 Ada", 364), ("RTX A6000", 155),
    ("A10G", 70), ("A10", 125), ("RTX 5090", 209), ("RTX 4090", 165), ("RTX 3090", 71),
    ("MI325X", 1307), ("MI300X", 1307), ("MI250X", 383),
)  # fmt: skip


def peak_flops(device: torch.device, compute: torch.dtype) -> float | None:
    """Returns peak operations per second in bfloat16; None on a CPU or unknown GPU."""
    if device.type != "cuda" or compute != torch.bfloat16:
        return None
    name = torch.cuda.get_device_name(device) + " "
    return next((peak * 1e12 for part, peak in _PEAK if part in name), None)


@dataclass(frozen=True)
class Work:
    """Operations of a train step."""

    per_token: float
    """4 N + 2 M + 6 S."""
    per_loss_token: float
    """4 V, or 6 V if the head is trained."""
    per_pair: float
    """Per pair of tokens: of a sequence of L tokens, multiplied by L^2."""

    @classmethod
    def of(cls, hf: Any) -> Work:
        """Counts them for a transformers causal language model, sharded or not."""
        config = hf.config.get_text_config()
        embedding = hf.get_input_embeddings().weight
        head = getattr(hf.get_output_embeddings(), "weight", None)
        experts = next(
            (n for k in ("num_experts", "num_local_experts", "n_routed_experts")
             if (n := getattr(config, k, None))), 1
        )  # fmt: skip
        routed = (getattr(config, "num_experts_per_tok", None) or 1) / experts

        def operations(parameter: Tensor) -> float:
            return parameter.numel() * (6.0 if parameter.requires_grad else 4.0)

        per_token = sum(
            operations(parameter) * (routed if ".experts." in name else 1.0)
            for name, parameter in hf.named_parameters()
            if parameter.ndim >= 2 and parameter is not embedding and parameter is not head
        )
        states = sum(state_products(module) for _, module in modules_of(decoder_of(hf)))
        last = 0.0 if head is None else operations(head)
        per_pair = 6.0 * sum(_query_width(each) for each in attention_layers(config))
        return cls(per_token + 6.0 * states, last, per_pair)

    @property
    def pair_cost(self) -> float:
        """Returns the cost of a pair of tokens divided by that of a loss token; see `packing`."""
        return self.per_pair / (self.per_token + self.per_loss_token)

    def flops(self, cu_seqlens: Tensor, loss_tokens: int) -> float:
        """Returns the number of operations for a batch of these sequences."""
        lengths = cu_seqlens.diff().double()
        layers = self.per_token * lengths.sum() + self.per_pair * lengths.square().sum()
        return float(layers) + self.per_loss_token * loss_tokens


def _query_width(config: Any) -> int:
    """Returns the query width of all heads of an attention layer."""
    heads = int(getattr(config, "num_attention_heads", None) or 1)
    dim = getattr(config, "head_dim", None)
    return heads * int(dim) if dim else int(config.hidden_size) // heads * heads


class Phases:
    """Adds up the time of named phases; on a GPU its own time, without waiting for it."""

    def __init__(self, device: torch.device) -> None:
        """Measures what runs on `device`."""
        self._cuda = device.type == "cuda"
        self._spans: list[tuple[str, Any, Any]] = []

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Returns a context whose time is measured."""
        start = self._now()
        yield
        self._spans.append((name, start, self._now()))

    def take(self, *names: str) -> dict[str, float]:
        """Returns the seconds of the named phases since the last call, 0 for one that was not.

        On a GPU it waits for the last of them, unless something was read from the device since.
        """
        if self._cuda and self._spans:
            self._spans[-1][2].synchronize()
        total = dict.fromkeys(names, 0.0)
        for name, start, end in self._spans:
            total[name] += start.elapsed_time(end) / 1e3 if self._cuda else end - start
        self._spans.clear()
        return total

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        make: Any = torch.cuda.Event
        event = make(enable_timing=True)
        event.record()
        return event


def peak_gib(device: torch.device) -> float:
    """Returns the peak memory so far: of the GPU's tensors, or of the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # in KiB on Linux
