"""LoRA: two small matrices beside each linear layer are trained, the model itself stays as it is.

    y = W x + scale * B (A x)      W frozen;  A [rank, in], B [out, rank];  scale = alpha / rank

peft puts them into the model, which keeps its Hub names (`hub_names`). Servers that can add them
(`weights.adapters`) get only A and B. All others, and a Hub folder, get plain weights, merged:
W + scale * B A. The model itself is never merged.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from areal.config.training import LoraConfig
from areal.errors import InvalidInput
from areal.weights.adapters import PREFIX, split_name
from areal.weights.manifest import AdapterInfo
from areal.weights.safetensors import HostTensor
from areal_torch.engines.model import fill
from areal_torch.engines.model.guards import decoder_of, is_scalar
from areal_torch.engines.model.recurrent import kind_of, modules_of

_ADAPTER = "default"  # peft's own name of the only one


def inject(hf: Any, config: LoraConfig, dtype: torch.dtype) -> None:
    """Puts adapters into a model on the meta device, and freezes the rest; `draw` fills them.

    Args:
        hf: transformers model.
        config: The adapters' configuration.
        dtype: The dtype in which they are trained.

    Raises:
        InvalidInput: No linear layer of the decoder has such a name.
    """
    from peft import LoraConfig as PeftConfig
    from peft import inject_adapter_in_model

    chosen = PeftConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        target_modules=_chosen(hf, config.targets),
        task_type="SEQ_CLS" if is_scalar(hf) else "CAUSAL_LM",
    )
    inject_adapter_in_model(chosen, hf, low_cpu_mem_usage=True)
    for _, module in _adapted(hf):
        module.lora_A.to(dtype)
        module.lora_B.to(dtype)
    if is_scalar(hf):  # which begins at 0: it is trained whole
        hf.score.to(dtype).requires_grad_(True)


def _chosen(hf: Any, targets: list[str]) -> list[str]:
    head = hf.score if is_scalar(hf) else hf.get_output_embeddings()
    # No batch reaches the towers for images and sounds.
    decoder = set(decoder_of(hf).modules()) - {head}
    beyond = set(_beyond(hf))
    linear = [
        n
        for n, m in hf.named_modules()
        if type(m) is nn.Linear and m in decoder and n not in beyond
    ]
    there = sorted({name.rpartition(".")[2] for name in linear})
    for target in targets or [""]:
        if target not in there and (targets or not there):
            raise InvalidInput(
                f"actor.lora.targets {target!r}: expected linear layers of {type(hf).__name__}, "
                f"not the head: {', '.join(there) or 'it has none'}"
            )
    return [name for name in linear if not targets or name.rpartition(".")[2] in targets]


def _beyond(hf: Any) -> Iterator[str]:
    """Names of linear layers that have no adapter: it would do nothing, or peft could not read it.

    State spaces read the weights of `dt_proj`, and their kernels that of `out_proj`, past the
    module, so peft refuses the latter. Beside experts that are one tensor, peft takes `down_proj`
    and its like for the experts'.
    """
    for name, module in modules_of(hf):
        if kind_of(module).startswith("Mamba"):
            yield from (f"{name}.dt_proj", f"{name}.out_proj")
    if any(".experts." in name and p.ndim == 3 for name, p in hf.named_parameters()):
        of_experts = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
        yield from (n for n, _ in hf.named_modules() if n.rpartition(".")[2] in of_experts)


def spread_parts(name: str, module: nn.Module, style: str) -> dict[str, str]:
    """Returns how tensor parallelism spreads the parts of a layer, by the parts' names.

    Where the layer's outputs are spread, each rank computes A x whole, and has the rows of B for
    its outputs. Where its inputs are spread, each rank has the columns of A for its inputs; A x is
    summed over the ranks, `rank` numbers per token, and each rank has B whole. A matrix that is
    whole has the same gradient on every rank.

    Args:
        name: The layer's.
        module: The layer, with or without an adapter.
        style: transformers' style for the layer itself.
    """
    if not (hasattr(module, "lora_A") and hasattr(module, "base_layer")):
        return {name: style}
    own = {"colwise": ["lora_B"], "rowwise": ["lora_A"]}.get(style, ["lora_A", "lora_B"])
    return {f"{name}.base_layer": style} | {f"{name}.{part}.{_ADAPTER}": style for part in own}


def is_adapted(module: nn.Module) -> bool:
    """Returns whether `inject` was called on a model."""
    return any(True for _ in _adapted(module))


def saved_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields the parameters that a checkpoint holds: all, or only the adapters if there are any.

    The other parameters have not changed since they were loaded.
    """
    adapters = is_adapted(model)
    for name, parameter in model.named_parameters():
        if not adapters or ".lora_" in name or name.endswith("score.weight"):
            yield name, parameter


@torch.no_grad()
def draw(hf: Any, seed: int) -> None:
    """Fills the adapters: A at random, as peft does, the same on any ranks in any layout; B with 0.

    Args:
        hf: The model; its tensors have memory.
        seed: The run's seed.
    """
    for name, module in _adapted(hf):
        down = module.lora_A[_ADAPTER].weight
        generator = torch.Generator().manual_seed(
            xxhash.xxh3_64_intdigest(f"{seed} {name}".encode()) >> 1
        )
        # Drawn in one precision on one device everywhere, and rounded afterwards.
        whole = torch.empty(down.shape, dtype=torch.float32)
        nn.init.kaiming_uniform_(whole, a=math.sqrt(5), generator=generator)
        fill.local(down).copy_(whole[fill.own_box(down)])
        fill.local(module.lora_B[_ADAPTER].weight).zero_()


@contextmanager
def switched_off(hf: Any) -> Iterator[None]:
    """Returns a context in which the model computes without its adapters."""
    modules = [module for _, module in _adapted(hf)]
    for module in modules:
        module.enable_adapters(False)
    try:
        yield
    finally:
        for module in modules:
            module.enable_adapters(True)


@dataclass(frozen=True)
class Delta:
    """The values that an adapter adds to this rank's part of a matrix: some rows and columns."""

    down: Tensor
    """The corresponding columns of A, with all its rows."""
    up: Tensor
    """The corresponding rows of B, in place."""
    scale: float

    def merged(self, part: Tensor) -> Tensor:
        """Returns W + scale * B A for this part of W, computed in float32 (float64)."""
        wide = torch.promote_types(torch.promote_types(part.dtype, self.up.dtype), torch.float32)
        product = torch.mm(self.up.to(wide), self.down.to(wide))
        return product.mul_(self.scale).add_(part)


@torch.no_grad()
def deltas(hf: Any) -> dict[str, Delta]:
    """Returns the deltas by the model's own name of each matrix; collective; empty: no adapters.

    The A matrices of all layers are gathered: 80 MB for a model of 7 billion parameters at rank 16.
    """
    found = {}
    for name, module in _adapted(hf):
        down, up = (part[_ADAPTER].weight.detach() for part in (module.lora_A, module.lora_B))
        whole = down.full_tensor() if hasattr(down, "full_tensor") else down
        _, columns = fill.own_box(module.base_layer.weight)
        found[f"{name}.weight"] = Delta(whole[:, columns], fill.local(up), module.scaling[_ADAPTER])
    return found


def published(hf: Any) -> dict[str, Tensor]:
    """Returns A and B of every layer, as this rank has them, by the names that peft reads."""
    return {
        f"{PREFIX}{name.replace(f'.{_ADAPTER}.', '.')}": parameter
        for name, parameter in hf.named_parameters()
        if ".lora_" in name
    }


def trained_beside(hf: Any) -> list[str]:
    """Returns names of trained parameters that no adapter contains."""
    return [n for n, p in hf.named_parameters() if p.requires_grad and ".lora_" not in n]


class Described:
    """Says of each adapter that is published what a server needs to know; for one thread.

    Args:
        config: The adapters'.
        base_digest: `PolicyVersion.digest` of the model without them.
    """

    def __init__(self, config: LoraConfig, base_digest: str) -> None:
        self._config, self._digest = config, base_digest
        self._before: tuple[str, dict[str, Tensor]] = ("", {})

    def info(self, name: str, tensors: tuple[HostTensor, ...]) -> AdapterInfo:
        """Returns the description of one, whose name is `name`."""
        scale = self._config.alpha / self._config.rank
        ups = {t.name: _values(t) for t in tensors if split_name(t.name)[1] == "B"}
        before, earlier = self._before
        self._before = name, ups
        changes = [ups[n] - earlier[n] for n in ups if n in earlier]
        return AdapterInfo(
            rank=self._config.rank,
            alpha=self._config.alpha,
            base_digest=self._digest,
            size=scale * _largest(list(ups.values())),
            before=before,
            change=scale * _largest(changes),
        )


def _values(tensor: HostTensor) -> Tensor:
    dtype = {"BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}
    kind = dtype.get(tensor.dtype, torch.float32)
    return torch.frombuffer(bytearray(tensor.data), dtype=kind).float()


def _largest(tensors: list[Tensor]) -> float:
    return max((float(tensor.abs().max()) for tensor in tensors), default=0.0)


def write(hf: Any, folder: Path, base: str) -> None:
    """Writes the adapters alone, as peft's `PeftModel.from_pretrained` reads them.

    Args:
        hf: The model, whole on this rank.
        folder: Created if missing.
        base: Path or Hub name of the model without the adapters.
    """
    from safetensors.torch import save_file

    config = hf.peft_config[_ADAPTER]
    config.base_model_name_or_path = base
    if is_scalar(hf):  # peft then reads the head, which was trained whole, with the adapters
        config.modules_to_save = ["score"]
    config.save_pretrained(str(folder))
    tensors = {
        f"base_model.model.{name.replace(f'.{_ADAPTER}.', '.')}": parameter.detach().contiguous()
        for name, parameter in saved_parameters(hf)
    }
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def _adapted(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields (the model's own name, peft's module) of each layer with an adapter."""
    for name, module in model.named_modules():
        if hasattr(module, "lora_A") and hasattr(module, "base_layer"):
            yield name, module
