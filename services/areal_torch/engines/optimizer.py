"""AdamW, with moments in float32 or in bfloat16 with stochastic rounding; or Muon (see `muon`).

With bfloat16, two bytes instead of four are kept of each moment. A step widens them piece by piece,
runs the fused float32 kernel, and rounds them to one of the two nearest bfloat16 values, up with a
probability that makes the mean exact. Rounding to the nearest would undo every update below 1/256
of a value, and a second moment changes by 1/1000 of itself (beta2 0.999). Weights, gradients and
arithmetic are the same as with float32. The random bits are those of the device's generator, whose
state is in each checkpoint, so a resumed run rounds as the first one did.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from areal.config.training import OptimizerConfig
from areal_torch.engines.model.guards import decoder_of
from areal_torch.engines.model.packed import PackedCausalLM
from areal_torch.engines.muon import MuonAdamW
from areal_torch.engines.parallel import gradients
from areal_torch.engines.parallel.apply import unsharded

PIECE = 1 << 25
"""Elements that are widened at once: 384 MiB for two moments and the random bits."""
_STATE_DECAYS = (".A_log", ".D", ".dt_bias")
_MOMENTS = ("exp_avg", "exp_avg_sq")


def make_optimizer(model: PackedCausalLM, config: OptimizerConfig) -> torch.optim.AdamW:
    """Makes the optimizer; norms, biases and the decays of states have no weight decay.

    A state's decay is exp(-exp(A_log) dt), and Mamba 1 has a matrix of A_log: pulled to 0, it would
    change how long each layer remembers, whatever the loss says.

    Raises:
        RuntimeError: The model is gathered, so the optimizer would update copies of its weights.
    """
    plain = [p for p in model.parameters() if p.requires_grad and not isinstance(p, DTensor)]
    alone = {id(p) for p in unsharded(model.hf).values()}
    if isinstance(model, FSDPModule) and any(id(p) not in alone for p in plain):
        raise RuntimeError("the model is gathered: expected reshard() before its optimizer is made")
    decays = {id(p) for name, p in model.named_parameters() if name.endswith(_STATE_DECAYS)}
    matrices = {id(p) for p in _matrices(model)} if config.type == "muon" else set[int]()
    # Fused AdamW takes tensors of one mesh at a time.
    groups = [
        {"params": chosen, "weight_decay": decay, "muon": muon}
        for same in gradients.by_mesh(p for p in model.parameters() if p.requires_grad)
        for muon, decay, chosen in (
            (True, config.weight_decay, [p for p in same if id(p) in matrices]),
            (
                False,
                config.weight_decay,
                [p for p in same if p.ndim >= 2 and id(p) not in decays | matrices],
            ),
            (False, 0.0, [p for p in same if p.ndim < 2 or id(p) in decays]),
        )
        if chosen
    ]
    kind = torch.optim.AdamW
    if config.type == "muon":
        kind = MuonAdamW
    elif config.moments == "bfloat16":
        kind = RoundedAdamW
    return kind(
        groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=True
    )


def _matrices(model: PackedCausalLM) -> Iterator[nn.Parameter]:
    """The weights of linear layers and of experts; not embeddings, the head, or routers."""
    for name, module in decoder_of(model.hf).named_modules():
        for last, parameter in module.named_parameters(recurse=False):
            stacked = "experts" in name and parameter.ndim == 3
            if stacked or (isinstance(module, nn.Linear) and last == "weight"):
                yield parameter


def make_state(optimizer: torch.optim.Optimizer) -> None:
    """Gives every parameter the optimizer state that its first step would create.

    A checkpoint before the first step then has the same tensors as any other, and loading has
    tensors to fill.
    """
    dtype = torch.bfloat16 if isinstance(optimizer, RoundedAdamW) else None
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if group.get("muon"):
                optimizer.state[parameter] = {"momentum_buffer": torch.zeros_like(parameter)}
                continue
            # Where fused AdamW expects it.
            step = torch.zeros((), dtype=torch.float32, device=parameter.device)
            moments = {name: torch.zeros_like(parameter, dtype=dtype) for name in _MOMENTS}
            optimizer.state[parameter] = {"step": step, **moments}


class RoundedAdamW(torch.optim.AdamW):
    """AdamW whose moments are bfloat16; its state comes from `make_state`."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """See torch.optim.AdamW; `closure` is not supported."""
        assert closure is None
        for group in self.param_groups:
            for piece in _pieces([p for p in group["params"] if p.grad is not None], self.state):
                self._step_piece(group, piece)

    def _step_piece(self, group: dict[str, Any], piece: list[tuple[Tensor, ...]]) -> None:
        weights, grads, first, second, steps = map(list, zip(*piece, strict=True))
        wide_first = [moment.float() for moment in first]
        wide_second = [moment.float() for moment in second]
        adamw(
            weights, grads, wide_first, wide_second, [], steps,
            fused=True, amsgrad=False, maximize=False,
            beta1=group["betas"][0], beta2=group["betas"][1],
            lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"],
            grad_scale=getattr(self, "grad_scale", None),
            found_inf=getattr(self, "found_inf", None),
        )  # fmt: skip
        for narrow, exact in zip(first + second, wide_first + wide_second, strict=True):
            narrow.copy_(round_stochastic_(exact))


def _pieces(parameters: list[Tensor], state: Any) -> Iterator[list[tuple[Tensor, ...]]]:
    """Yields flat parts of (parameter, gradient, moments, step) of this rank's shards."""
    piece, total = list[tuple[Tensor, ...]](), 0
    for parameter in parameters:
        assert parameter.grad is not None
        own = state[parameter]
        tensors = (parameter, parameter.grad, *(own[name] for name in _MOMENTS))
        flat = [_local(tensor).view(-1) for tensor in tensors]
        for begin in range(0, len(flat[0]), PIECE):
            part = slice(begin, begin + PIECE)
            # The last part counts the step; the others count a copy.
            last = begin + PIECE >= len(flat[0])
            step = own["step"] if last else own["step"].clone()
            if piece and total + min(PIECE, len(flat[0]) - begin) > PIECE:
                yield piece
                piece, total = [], 0
            piece.append((*(each[part] for each in flat), step))
            total += len(piece[-1][0])
    if piece:
        yield piece


def round_stochastic_(exact: Tensor) -> Tensor:
    """Returns float32 values as bfloat16, rounded up or down at random; overwrites its argument.

    bfloat16 is the upper half of float32. Adding 16 random bits to the lower half carries into the
    upper one with the probability that the lower half has as a fraction of the distance.
    """
    bits = exact.view(torch.int32)
    bits.add_(torch.empty_like(bits).random_(0, 1 << 16))
    return bits.bitwise_and_(-1 << 16).view(torch.float32).to(torch.bfloat16)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
