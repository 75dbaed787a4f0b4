"""The Hub's names and shapes: what `save_pretrained` writes and every inference server reads.

transformers keeps some tensors of a loaded model under other names and in other shapes than the
Hub's files: `mlp.experts.gate_up_proj` holds what the files call `mlp.experts.0.gate_proj.weight`
and so on, GPT-NeoX's `lm_head` is the files' `embed_out`. It registers for each family how one is
made of the other. Whatever leaves the trainer for a server or a person is converted here, and so
is what comes from a Hub directory. Only checkpoints keep the model's own names.

    model ── export_steps() ──> publish, save     as transformers.revert_weight_conversion
    model <── import_steps() ── load              as convert_and_load_state_dict_in_model

Both are transformers' own loops, taken apart: a step holds what is converted together (the experts
of one layer, say), so that the caller gathers, converts and drops one step at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from areal.errors import InvalidInput
from areal_torch.engines.model.tensor_directory import TensorDirectory

Shapes = Mapping[str, tuple[int, ...]]


@dataclass
class Step:
    """Tensors of one side that are converted together to tensors of the other."""

    target: str
    """The first tensor that it makes, which is the only one if there is no converter."""
    converter: Any = None
    """transformers' `WeightConverter`; None: only the name changes."""
    renamings: list[Any] = field(default_factory=list)
    """transformers' `WeightRenaming`s of what the converter makes."""
    sources: list[tuple[str, str]] = field(default_factory=list)
    """(name, the converter's pattern that it matched), in the order that the converter wants."""

    @property
    def names(self) -> list[str]:
        """Names of the tensors that `run` takes."""
        return [name for name, _ in self.sources]

    @torch.no_grad()
    def run(self, hf: Any, tensors: Iterable[Tensor]) -> list[tuple[str, Tensor]]:
        """Converts the tensors.

        Args:
            hf: The model; some converters ask it for sizes.
            tensors: Whole ones in the order of `names`; on the meta device only shapes come out.

        Returns:
            (name, contiguous tensor) of the other side; some may be views of one memory.
        """
        if self.converter is None:
            (tensor,) = tensors
            return [(self.target, tensor)]
        converter = deepcopy(self.converter)
        for (name, pattern), tensor in zip(self.sources, tensors, strict=True):
            converter.add_tensor(self.target, name, pattern, tensor)
        made = converter.convert(self.target, model=hf, config=hf.config)
        return [
            (
                _renamed(name, self.renamings),
                (found[0] if isinstance(found, list) else found).contiguous(),
            )
            for name, found in made.items()
        ]


def live_tensors(hf: Any) -> dict[str, Tensor]:
    """Returns the parameters and saved buffers by the model's own names; tied ones once."""
    seconds = _tied(hf)
    return {name: tensor for name, tensor in _state(hf).items() if name not in seconds}


def export_steps(hf: Any) -> list[Step]:
    """Returns the steps that convert `live_tensors` to a Hub directory's; the same on every rank.

    What was converted when the model was loaded is reverted, so that the names of its own directory
    come out again (see `remember`); a model made from a config alone gets its family's.
    """
    from transformers.core_model_loading import PrefixChange, dot_natural_key

    used = getattr(hf, "_weight_conversions", None)
    if used is None:
        used = _conversions(hf, legacy=False)
        used = [conversion for conversion in used if not isinstance(conversion, PrefixChange)]
    renamings, converters, by_pattern = _sorted_out([c.reverse_transform() for c in reversed(used)])
    unsaved = set(hf._keys_to_ignore_on_save or ())
    own = getattr(hf, "_names_in_files", {})
    steps: dict[str, Step] = {}
    for name in sorted(live_tensors(hf).keys() - unsaved, key=dot_natural_key):
        target, pattern = _converted(name, converters)
        if pattern is None:
            target = own.get(name) or _renamed(name, renamings)
            step = steps.setdefault(target, Step(target))
        else:
            step = steps.setdefault(target, Step(target, by_pattern[pattern], renamings))
        step.sources.append((name, pattern or name))
    return list(steps.values())


def import_steps(hf: Any, directory: TensorDirectory) -> tuple[list[Step], list[Any]]:
    """Returns the steps that convert a Hub directory's tensors to `live_tensors`; checks all first.

    Returns:
        Steps that make every live tensor, and transformers' conversions that take part. What
        transformers ignores is left out (rotary frequencies, layers for speculative decoding), and
        so is a second name of a tied tensor.

    Raises:
        InvalidInput: A tensor is unknown, missing, of another shape, or given twice, differently.
    """
    found = directory.shapes
    steps, unknown, used = _targets(hf, found)
    for second, kept in _tied(hf).items():
        if second not in steps:
            continue
        step = steps.pop(second)
        if kept not in steps:
            step.target = kept
            steps[kept] = step
        elif not _same(directory, step, steps[kept]):
            raise InvalidInput(
                f"{step.names[0]!r} differs from {steps[kept].names[0]!r}, but config.json ties "
                "them: expected the same values, or tie_word_embeddings: false"
            )
    wanted = {name: tuple(tensor.shape) for name, tensor in live_tensors(hf).items()}
    made: dict[str, tuple[int, ...]] = {}
    for step in steps.values():
        made |= _shapes_made(hf, step, found)
    missing = wanted.keys() - made.keys() - set(hf._keys_to_ignore_on_save or ())
    missing |= left_on_disk(hf) - set(unknown.values())
    missing, unexpected = _heeded(hf, missing, unknown.values())
    wrong = missing | {name for name, shape in made.items() if shape != wanted.get(name)}
    if wrong or unexpected:
        raise InvalidInput(
            _difference(
                hf, found, wrong, [name for name, target in unknown.items() if target in unexpected]
            )
        )
    return list(steps.values()), used


def remember(hf: Any, steps: Iterable[Step], used: list[Any]) -> None:
    """Notes how the model's own directory was read, for `export_steps`.

    Names are noted too, because a renaming need not be reversible: Kimi-Linear's dense layers and
    its layers of experts have two names in files, and one in the model.

    Args:
        hf: The model.
        steps: Those of `import_steps`.
        used: Its conversions.
    """
    kept = set(_tied(hf).values())  # one name of several, maybe not the one that is saved
    hf._weight_conversions = used
    hf._names_in_files = {
        step.target: step.names[0]
        for step in steps
        if step.converter is None and step.target not in kept
    }


def repeated(hf: Any, found: Shapes) -> dict[str, str]:
    """Returns the directory's second names of tied tensors -> the names that are read."""
    steps, _, _ = _targets(hf, found)
    return {
        steps[second].names[0]: steps[kept].names[0]
        for second, kept in _tied(hf).items()
        if second in steps and kept in steps
    }


def contradicts_ties(hf: Any, source: Path) -> bool:
    """Whether a directory has two tensors, with different values, that the model ties."""
    try:
        directory = TensorDirectory(source)
        steps, _, _ = _targets(hf, directory.shapes)
    except InvalidInput:  # `import_steps` says what is wrong
        return False
    with directory:
        return any(
            second in steps and kept in steps and not _same(directory, steps[second], steps[kept])
            for second, kept in _tied(hf).items()
        )


def bystanders(hf: Any, source: Path) -> list[str]:
    """Returns tensors of the model's directory that transformers knows but does not load.

    Layers for speculative decoding, the tower for images beside a language model, old masks: a
    version without them would not be the model that servers started with.

    Args:
        hf: The model.
        source: Its directory.
    """
    try:
        directory = TensorDirectory(source)
    except InvalidInput:  # no safetensors: no one can serve it as version 0 either
        return []
    live = {name: tuple(tensor.shape) for name, tensor in live_tensors(hf).items()}
    exported = {name for step in export_steps(hf) for name in _shapes_made(hf, step, live)}
    with directory:
        others = {n: shape for n, shape in directory.shapes.items() if n not in exported}
    _, unknown, _ = _targets(hf, others)
    _, unexpected = _heeded(hf, (), unknown.values())
    # Frequencies are computed, and manifests leave them out.
    return [
        name
        for name, target in unknown.items()
        if target not in unexpected and not name.endswith("rotary_emb.inv_freq")
    ]


def _targets(hf: Any, found: Shapes) -> tuple[dict[str, Step], dict[str, str], list[Any]]:
    """Steps by what they make; what fits no tensor of the model: name -> target; conversions."""
    from transformers.core_model_loading import dot_natural_key, rename_source_key

    state = _state(hf)
    everything = {**state, **dict.fromkeys(left_on_disk(hf))}
    conversions = _conversions(hf, legacy=True)
    renamings, converters, by_pattern = _sorted_out(conversions)
    steps: dict[str, Step] = {}
    unknown: dict[str, str] = {}
    for name in sorted(found, key=dot_natural_key):
        target, pattern = rename_source_key(
            name, renamings, converters, hf.base_model_prefix, everything
        )
        if target not in everything and name in everything:
            target, pattern = name, None
        if target not in state:
            unknown[name] = target
            continue
        step = steps.setdefault(target, Step(target, by_pattern.get(pattern)))
        if step.sources and (step.converter is None or pattern is None):
            raise InvalidInput(f"{step.names[0]!r} and {name!r} are the same tensor: expected one")
        step.sources.append((name, pattern or name))
    return steps, unknown, [each for each in conversions if each.was_used()]


def known_conversions(hf: Any) -> dict[bool, list[Any]]:
    """Returns how transformers converts a model's tensors: with what is legacy, and without.

    `source.build` notes it before FSDP shards any module. FSDP makes classes of its own, which
    transformers takes for custom code: it would leave out what it knows of a decoder within a
    checkpoint of several models.
    """
    return {each: _conversions(hf, legacy=each) for each in (True, False)}


def _conversions(hf: Any, *, legacy: bool) -> list[Any]:
    """Returns new objects each time, because they note what they were used for."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    known = getattr(hf, "_known_conversions", None)
    if known is None:
        return list(get_model_conversion_mapping(hf, add_legacy=legacy))
    return deepcopy(known[legacy])


def left_on_disk(hf: Any) -> frozenset[str]:
    """Returns the model's own names of the tensors of towers that `source.build` left out.

    They are read from the directory wherever the model's tensors leave the trainer (`bystanders`).
    """
    return getattr(hf, "_left_on_disk", frozenset())


def _state(hf: Any) -> dict[str, Tensor]:
    state = hf.state_dict(keep_vars=True)
    # A layer with an adapter beside it (`lora`) keeps its name; the adapter has none on the Hub.
    return {
        name.replace(".base_layer.", "."): value
        for name, value in state.items()
        if isinstance(value, Tensor) and ".lora_" not in name
    }


def _tied(hf: Any) -> dict[str, str]:
    """Maps second names of tied tensors to the name that `save_pretrained` keeps."""
    names_of: dict[int, list[str]] = {}
    for name, tensor in _state(hf).items():
        names_of.setdefault(id(tensor), []).append(name)
    result: dict[str, str] = {}
    for names in names_of.values():
        kept = next((n for n in sorted(names) if n not in hf.all_tied_weights_keys), max(names))
        result |= {name: kept for name in names if name != kept}
    return result


def _sorted_out(conversions: Sequence[Any]) -> tuple[list[Any], list[Any], dict[str, Any]]:
    """Renamings, converters, and the converters by the pattern of what they take."""
    from transformers.core_model_loading import WeightConverter, WeightRenaming

    renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    return renamings, converters, by_pattern


# transformers has functions for both only since 5.21.
def _renamed(name: str, renamings: Sequence[Any]) -> str:
    for renaming in renamings:
        name, _ = renaming.rename_source_key(name)
    return name


def _converted(name: str, converters: Sequence[Any]) -> tuple[str, str | None]:
    """The name that the first matching converter makes, and the pattern that it matched."""
    for converter in converters:
        name, pattern = converter.rename_source_key(name)
        if pattern is not None:
            return name, pattern
    return name, None


def _same(directory: TensorDirectory, one: Step, other: Step) -> bool:
    a, b = one.names[0], other.names[0]
    if directory.shapes[a] != directory.shapes[b]:
        return False
    rows, *rest = (slice(0, size) for size in directory.shapes[a])
    parts = (slice(at, min(at + 1024, rows.stop)) for at in range(0, rows.stop, 1024))
    return all(
        torch.equal(directory.read(a, (part, *rest)), directory.read(b, (part, *rest)))
        for part in parts
    )


def _shapes_made(hf: Any, step: Step, given: Shapes) -> dict[str, tuple[int, ...]]:
    """Returns the shapes that a step makes; empty if it cannot be run."""
    tensors = [torch.empty(given[name], device="meta") for name in step.names]
    try:
        return {name: tuple(tensor.shape) for name, tensor in step.run(hf, tensors)}
    except (RuntimeError, ValueError, IndexError):  # experts of different shapes, say
        return {}


def _heeded(hf: Any, missing: Iterable[str], unknown: Iterable[str]) -> tuple[set[str], set[str]]:
    """Returns both, without the names that transformers ignores in this family."""
    from transformers.utils.loading_report import LoadStateDictInfo

    info = LoadStateDictInfo(
        missing_keys=set(missing),
        unexpected_keys=set(unknown) - left_on_disk(hf),
        mismatched_keys=set(),
        error_msgs=[],
        conversion_errors={},
        skipped_pp_keys=set(),
    )
    hf._adjust_missing_and_unexpected_keys(info)
    return info.missing_keys, info.unexpected_keys


def _difference(hf: Any, found: Shapes, wrong: set[str], unknown: Sequence[str]) -> str:
    """Describes what is wrong with a directory, in the Hub's names; `wrong` are the model's own."""
    live = {name: tuple(tensor.shape) for name, tensor in live_tensors(hf).items()}
    lacking, misshapen = list[str](), list[str]()
    for step in export_steps(hf):
        if wrong.isdisjoint(step.names):
            continue
        for name, shape in _shapes_made(hf, step, live).items():
            if name not in found:
                lacking.append(name)
            elif found[name] != shape:
                misshapen.append(f"{name!r} has shape {found[name]}, expected {shape}")
    lacking += sorted(wrong & left_on_disk(hf))
    parts = [f"lacks {_some(lacking)}"] if lacking else []
    parts += [f"has unknown {_some(unknown)}"] if unknown else []
    parts += misshapen[:1]
    if not parts:  # it holds tensors under the model's own names, and these are not right
        parts.append(f"{min(wrong)!r} has another shape")
    return f"{'; '.join(parts)}: expected the tensors of a {type(hf).__name__} on the Hub"


def _some(names: Iterable[str]) -> str:
    """The first, and how many more."""
    first, *others = sorted(names)
    return f"tensor {first!r}" + (f" (and {len(others)} more)" if others else "")
