"""Where a model comes from: a Hugging Face directory, loaded whole or read tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from areal.engines.model import guards
from areal.errors import InvalidInput
from areal.weights.manifest import read_tensors, weight_files


def load_model(path: str, dtype: torch.dtype, *, flash: bool, from_scratch: bool, seed: int) -> Any:
    """Make a transformers causal language model on the CPU.

    Raises:
        InvalidInput: the directory does not exist, has no config.json, is none that transformers
            can load, or lacks tensors, for which transformers would draw random numbers.
    """
    directory = Path(path)
    if not (directory / "config.json").is_file():
        raise InvalidInput(
            f"path={path!r}: expected a Hugging Face model directory with config.json"
        )
    from transformers.utils import logging

    logging.disable_progress_bar()
    attention = "flash_attention_2" if flash else "eager"
    try:
        hf = _load(directory, dtype, attention, seed if from_scratch else None)
    except (ImportError, OSError, ValueError) as error:
        # An unknown architecture, code that would have to be downloaded, an absent kernel.
        why = " ".join(str(error).split())
        raise InvalidInput(f"path={path!r}: transformers cannot load it: {why}") from error
    guards.silence_noise(hf)
    if dtype == torch.float64:
        _use_exact_norms(hf)
    return hf


def _check_loaded(hf: Any, path: str, missing: Iterable[str]) -> None:
    """Refuse what transformers only warns of."""
    for name in sorted(missing):
        raise InvalidInput(
            f"path={path!r}: tensor {name!r} of {type(hf).__name__} is not in its files; expected "
            "a complete model, or init_from_scratch=true for random weights"
        )
    for second, first in hf.get_expanded_tied_weights_keys(all_submodels=True).items():
        if hf.get_parameter(second) is not hf.get_parameter(first):
            raise InvalidInput(
                f"path={path!r}: {second!r} differs from {first!r}, but config.json ties them, as "
                "servers will; expected equal values, or tie_word_embeddings: false"
            )


def _load(directory: Path, dtype: torch.dtype, attention: str, seed: int | None) -> Any:
    """With the directory's weights, or with fresh ones of a seed."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if seed is not None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            config = AutoConfig.from_pretrained(directory)
            return AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=attention
            )
    hf, told = AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, attn_implementation=attention, output_loading_info=True
    )
    _check_loaded(hf, str(directory), told["missing_keys"])
    return hf


class _RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight in the precision of x."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


@torch.no_grad()
def _use_exact_norms(hf: Any) -> None:
    """Replace norms that compute in float32 even in a float64 model."""
    for parent in list(hf.modules()):
        for name, child in list(parent.named_children()):
            eps = getattr(child, "variance_epsilon", getattr(child, "eps", None))
            if not type(child).__name__.endswith("RMSNorm") or eps is None:
                continue
            exact = _RMSNorm(child.weight, eps)
            probe = torch.linspace(-2, 3, child.weight.numel(), dtype=torch.float64)
            # Some architectures scale by 1 + weight, say: those stay as they are.
            if torch.allclose(exact(probe), child(probe), rtol=1e-4, atol=1e-5):
                setattr(parent, name, exact)


class TensorDirectory:
    """The weights of a Hugging Face directory, to be read one by one; a context manager.

    Example:
        >>> with TensorDirectory(Path("runs/tiny")) as tensors:
        ...     norm = tensors.read("model.norm.weight")
    """

    def __init__(self, directory: Path) -> None:
        """Read the headers.

        Raises:
            InvalidInput: it has no safetensors weights, or not all of them.
        """
        self.shapes: dict[str, tuple[int, ...]] = {}
        """Of every tensor, by name."""
        self._file_of: dict[str, Path] = {}
        self._open: dict[Path, Any] = {}
        self._closing = ExitStack()
        for file in weight_files(directory):
            for tensor in read_tensors(file):
                self.shapes[tensor.name] = tensor.shape
                self._file_of[tensor.name] = file

    def __enter__(self) -> Self:
        """Files are opened when something is read from them."""
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    def read(self, name: str) -> Tensor:
        """One tensor, on the CPU, as it was saved."""
        from safetensors import safe_open

        file = self._file_of[name]
        if file not in self._open:
            self._open[file] = self._closing.enter_context(safe_open(file, framework="pt"))
        tensor: Tensor = self._open[file].get_tensor(name)
        return tensor
