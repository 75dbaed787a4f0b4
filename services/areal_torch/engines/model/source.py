"""Loads a model from a Hugging Face directory: its config first, its weights later."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from areal.chassis.collector import collector_paused
from areal.chassis.logging import get_logger
from areal.errors import InvalidInput
from areal.model_directory import read_config, refuse_quantized
from areal_torch.engines.model import fill, guards, hub_names, precision
from areal_torch.engines.model.attention.dispatch import in_a_line
from areal_torch.engines.model.guards import is_scalar


def build(
    path: str, dtype: torch.dtype, *, scalar: bool = False, from_scratch: bool = False
) -> Any:
    """Makes a transformers causal language model from its config: parameters on the meta device.

    A checkpoint of several models is built as its own class, so that its names and configuration
    stay. Towers that no batch reaches stay on disk, and go from there wherever the model goes
    (`hub_names.bystanders`). Buffers that are not in its files are computed.

    Args:
        path: A folder with config.json.
        dtype: dtype of the parameters.
        scalar: Give it a scalar head, `score`, instead of the language-model head.
        from_scratch: The folder has no weights, so towers are in the model, frozen.

    Raises:
        InvalidInput: There is no such folder, its weights are quantized, or transformers cannot
            build such a model.
    """
    directory = Path(path)
    if not (directory / "config.json").is_file():
        raise InvalidInput(
            f"path={path!r}: expected a Hugging Face model directory with config.json"
        )
    refuse_quantized(directory)
    with collector_paused():
        from transformers import (
            AutoConfig,
            AutoModelForCausalLM,
            AutoModelForImageTextToText,
            AutoModelForSequenceClassification,
        )
        from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
        kind: Any = AutoModelForCausalLM
        if scalar:
            kind, config.num_labels = AutoModelForSequenceClassification, 1
        elif type(config) not in kind._model_mapping or (
            # Some composite configurations also name a class that has the text model alone.
            config.get_text_config() is not config
            and type(config) in AutoModelForImageTextToText._model_mapping
        ):
            kind = AutoModelForImageTextToText
        # The model's class is imported on first use, with much of torch.
        # transformers would ask on a terminal whether to run a folder's code.
        options = {"dtype": dtype, "attn_implementation": "eager", "trust_remote_code": False}
        with collector_paused(), torch.device("meta"):
            hf = kind.from_config(config, **options)
        # Mistral Small 3 does not say that it has a head of its own, and its class ties by default.
        unsaid = "tie_word_embeddings" not in read_config(directory)
        if unsaid and not from_scratch and hub_names.contradicts_ties(hf, directory):
            config.tie_word_embeddings = False
            get_logger(__name__).info(
                "output_head", path=path, untied="the checkpoint has one; config.json does not say"
            )
            with torch.device("meta"):
                hf = kind.from_config(config, **options)
        fill.make_buffers(hf)
        hf._known_conversions = hub_names.known_conversions(hf)
    except InvalidInput:
        raise
    # A folder is a stranger's: transformers raises anything.
    except Exception as error:
        file = str(directory / "config.json")
        raise InvalidInput(f"{file!r}: transformers cannot load it: {reason(error)}") from error
    if scalar:
        if not is_scalar(hf):
            raise InvalidInput(
                f"path={path!r}: {type(hf).__name__} has no linear `score`: it cannot be a critic "
                "or a reward model"
            )
        # A language model's directory has the one head and lacks the other.
        hf._keys_to_ignore_on_load_unexpected = {r"lm_head\.weight"}
        hf._keys_to_ignore_on_load_missing = {r"score\.weight"}
    if not from_scratch:
        hf._left_on_disk = guards.drop_towers(hf)
    guards.silence_noise(hf)
    precision.widen(hf, dtype)
    if dtype == torch.float64:
        _use_exact_norms(hf)
        if hf._can_set_experts_implementation():
            hf.set_experts_implementation("eager")  # torch has no grouped product of float64
    return hf


def load_weights(hf: Any, path: str) -> None:
    """Reads this rank's part of the weights and the generation defaults beside them.

    Raises:
        InvalidInput: The directory has no safetensors weights, or those of another model, or its
            generation_config.json is broken.
    """
    from transformers import GenerationConfig

    directory = Path(path)
    file = directory / "generation_config.json"
    if file.is_file():
        try:
            hf.generation_config = GenerationConfig.from_pretrained(directory)
        except Exception as error:
            raise InvalidInput(
                f"{str(file)!r}: transformers cannot read it: {reason(error)}"
            ) from error
    if is_scalar(hf):  # zero where the directory has none
        fill.local(hf.score.weight.detach()).zero_()
    hub_names.remember(hf, *fill.load_own(hf, directory))


def reason(error: Exception) -> str:
    """Returns in one line why transformers does not take a folder."""
    if "trust_remote_code" in str(error):  # transformers' advice, which no key here follows
        return "auto_map: code of its own is not run; expected a model_type that transformers knows"
    return in_a_line(error)


def fill_weights(hf: Any, path: str, dtype: torch.dtype, *, from_scratch: bool, seed: int) -> None:
    """Fills a model that `build` made and that has memory: from the directory, or at random.

    Raises:
        InvalidInput: See `load_weights`.
    """
    if from_scratch:
        skeleton = build(path, dtype, scalar=is_scalar(hf), from_scratch=True)
        fill.draw_own(hf, skeleton, seed)
    else:
        load_weights(hf, path)


def load_model(path: str, dtype: torch.dtype, *, from_scratch: bool, seed: int) -> Any:
    """Loads a whole model on the CPU, in this process alone.

    Raises:
        InvalidInput: See `build` and `load_weights`.
    """
    hf, cpu = build(path, dtype, from_scratch=from_scratch), torch.device("cpu")
    fill.materialize(hf, cpu, cpu)
    fill_weights(hf, path, dtype, from_scratch=from_scratch, seed=seed)
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
    """Replaces norms that compute in float32 even in a float64 model; their weights are meta."""
    for parent in list(hf.modules()):
        for name, child in list(parent.named_children()):
            eps = getattr(child, "variance_epsilon", getattr(child, "eps", None))
            if not type(child).__name__.endswith("RMSNorm") or eps is None:
                continue
            tried = copy.deepcopy(child).to_empty(device="cpu")
            tried.weight.copy_(torch.linspace(0.5, 1.5, tried.weight.numel()))
            probe = torch.linspace(-2, 3, child.weight.numel(), dtype=torch.float64)
            # Some architectures scale by 1 + weight, say: those stay as they are.
            exact = _RMSNorm(tried.weight, eps)(probe)
            if torch.allclose(exact, tried(probe), rtol=1e-4, atol=1e-5):
                setattr(parent, name, _RMSNorm(child.weight, eps))
