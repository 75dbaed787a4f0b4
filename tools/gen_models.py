#!/usr/bin/env python3
"""Writes docs/models.md: every causal language model of transformers, tried with random weights.

    PYTHONPATH=services python tools/gen_models.py [MODEL_TYPE ...]

With model types: tries those, prints what was found, writes nothing. Ends with 1 when an
architecture that the trainer accepts is computed wrong.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "services")]

from tools.tiny_architectures import COMPOSITE, NotTried, tiny_model  # noqa: E402

from areal.errors import InvalidInput  # noqa: E402
from areal_torch.algorithms import packing  # noqa: E402
from areal_torch.engines.model.guards import drop_towers, placeholders, silence_noise  # noqa: E402
from areal_torch.engines.model.heads import LogprobHead  # noqa: E402
from areal_torch.engines.model.packed import PackedCausalLM  # noqa: E402
from areal_torch.engines.model.self_test import self_test  # noqa: E402
from areal_torch.engines.parallel.apply import decoder_layers  # noqa: E402

PAGE = ROOT / "docs" / "models.md"
RIGHT, REFUSED, NOT_TRIED, WRONG = "right", "refused", "not tried", "wrong"
LOGPROB_TOLERANCE = 4e-5
"""Largest difference of a logprob, in nats."""
GRADIENT_TOLERANCE = 1e-4
"""Norm of the difference of all gradients over their norm."""
# Two groups with a common prefix and a long sequence alone: (prefix, what each sequence adds).
_GROUPS = ((11, (13, 4)), (5, (20, 1)), (0, (70,)))


@dataclass(frozen=True)
class Row:
    """What was found of one architecture."""

    model_type: str
    architecture: str
    result: str
    note: str = ""
    """Why it is refused, or was not tried."""


def registry() -> dict[str, str]:
    """Model type to class, as transformers' AutoModelForCausalLM has them.

    Checkpoints of several models have the class of all of them.
    """
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    several = {kind: MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[kind] for kind in COMPOSITE}
    return dict(sorted({**MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, **several}.items()))


def try_architecture(model_type: str, seed: int = 0) -> Row:
    """Makes a tiny model, starts it as a trainer would, and compares it with plain transformers."""
    name = registry()[model_type]
    try:
        hf = tiny_model(model_type, seed)
    except NotTried as error:
        return Row(model_type, name, NOT_TRIED, str(error))
    trained = copy.deepcopy(hf)
    drop_towers(trained)
    silence_noise(trained)
    try:
        model = PackedCausalLM(trained, kernel="packed", chunk_elements=1 << 12)
        self_test(model, torch.device("cpu"), torch.float32)
        decoder_layers(trained)
    except InvalidInput as error:
        return Row(model_type, name, REFUSED, _reason(str(error)))
    logprob, gradient = errors(hf, model, seed)
    if logprob <= LOGPROB_TOLERANCE and gradient <= GRADIENT_TOLERANCE:
        return Row(model_type, name, RIGHT)
    return Row(model_type, name, WRONG, f"logprobs {logprob:.1e}, gradient {gradient:.1e}")


def _reason(message: str) -> str:
    message = message.partition(" cannot be trained on packed sequences: ")[2] or message
    message = message.partition("; choose another model")[0]
    # Digits are the machine's.
    return re.sub(r"differ by \S+ nats.*", "differ from those of each sequence alone", message)


def errors(
    hf: Any,
    model: PackedCausalLM,
    seed: int,
    *,
    given: Sequence[tuple[int, Sequence[int]]] = _GROUPS,
    share_prefixes: bool = True,
) -> tuple[float, float]:
    """Largest difference of a logprob, and relative difference of the gradient.

    Args:
        hf: Plain transformers model with eager attention, in eval(): one sequence at a time.
        model: The same weights, packed.
        seed: Of the tokens.
        given: Of each group the tokens of its prefix, and what each sequence adds.
        share_prefixes: Compute a prefix once.
    """
    generator = torch.Generator().manual_seed(seed)
    vocabulary = hf.config.get_text_config().vocab_size
    reserved = placeholders(hf.config)

    def tokens(count: int) -> list[int]:
        drawn = torch.randint(3, vocabulary, (count,), generator=generator).tolist()
        return [3 if token in reserved else token for token in drawn]

    sequences, groups = [], []
    for group, (common, added) in enumerate(given):
        prefix = tokens(common)
        sequences += [prefix + tokens(count) for count in added]
        groups += [group] * len(added)
    parts = []
    for ids in sequences:
        logits = hf(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1].float()
        chosen = torch.tensor(ids[1:])[:, None]
        parts.append(torch.log_softmax(logits, -1).gather(1, chosen)[:, 0])
    expected = torch.cat(parts)
    batch = packing.pack(
        [{"input_ids": ids, "loss_mask": [False] + [True] * (len(ids) - 1)} for ids in sequences],
        groups,
    )
    targets = torch.nonzero(batch["loss_mask"]).flatten()
    found, _ = model(
        batch, model.plan(batch, share_prefixes=share_prefixes), targets, LogprobHead()
    )
    weight = torch.cos(torch.arange(len(expected))) + 1.2
    (expected * weight).sum().backward()
    (found * weight).sum().backward()
    want, have = _gradients(hf), _gradients(model.hf)
    if want.keys() != have.keys():
        return float((found - expected).abs().max()), float("inf")
    norm = sum(float(g.double().square().sum()) for g in want.values()) ** 0.5
    apart = sum(float((have[k] - want[k]).double().square().sum()) for k in want) ** 0.5
    return float((found - expected).detach().abs().max()), apart / norm


def _gradients(hf: Any) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in hf.named_parameters() if p.grad is not None}


def render(rows: list[Row]) -> str:
    """Returns the text of docs/models.md."""
    import transformers

    def table(result: str, *, notes: str = "") -> list[str]:
        chosen = [row for row in rows if row.result == result]
        head = ["model_type", "class", *([notes] if notes else [])]
        lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
        for row in chosen:
            cells = [f"`{row.model_type}`", row.architecture]
            cells += [row.note.replace("|", "\\|")] if notes else []
            lines.append(f"| {' | '.join(cells)} |")
        return lines

    def count(result: str) -> int:
        return sum(row.result == result for row in rows)

    lines = [
        "# Models",
        "",
        "<!-- Written by tools/gen_models.py; a test compares every line. -->",
        "",
        "This page lists every causal language model that transformers "
        f"{transformers.__version__} provides",
        "(`AutoModelForCausalLM`), and some checkpoints of several models. If a tiny version of "
        "a model can be",
        "made, that version was tested with",
        "random weights that are large enough for errors to show. The trainer packs sequences end "
        "to end and",
        "computes common prefixes once. The test compares the trainer's results with those of "
        "plain eager",
        "transformers, which gets one sequence at a time. **Correct** means that in float32, every "
        "logprob",
        f"differs by at most {LOGPROB_TOLERANCE:g} nats, and the gradient by at most "
        f"{GRADIENT_TOLERANCE:g} of its norm.",
        "",
        "Whatever this page says, each run repeats the comparison with its own weights before it "
        "trains. If",
        "the model is big, the run compares only the first layers. If the results differ, the run "
        "stops with",
        "a one-line error. So a new architecture, custom model code, or a different version of",
        "transformers cannot silently make training incorrect. `areal doctor FOLDER` makes the "
        "same",
        "comparison without a run.",
        "",
        "A quantized checkpoint (`quantization_config` in its config.json: FP8, AWQ, GPTQ, MXFP4 "
        "and so on) is",
        "refused. Train a bfloat16 copy of it. Code that a checkpoint brings along (`auto_map`) is "
        "not run.",
        "",
        f"## Correct ({count(RIGHT)})",
        "",
        "Another test trains each of these models for a step, saves it, and loads it with "
        "transformers, which",
        "then computes the same logprobs: all weights in float32, LoRA with its default targets, "
        "and a step in",
        "bfloat16. Exceptions: `gpt2` and `gpt-sw3` have no linear layers for LoRA, and "
        "`minimax` computes in",
        "float32 only. In bfloat16, some tensors stay in float32, also in published weights and "
        "exports: those",
        "that transformers lists for a family (routers, say), biases that balance experts, and "
        "`A_log`,",
        "`dt_bias` and norms of recurrent layers.",
        "",
        "Layers with a state or a convolution (gated delta rules, Mamba 1 and 2, lightning "
        "attention, short",
        "convolutions) are computed by the architecture's own functions on whole sequences of "
        "similar length, so",
        "no state crosses a boundary. A common prefix costs them as often as it occurs. On a GPU "
        "the packages",
        "that transformers finds (flash-linear-attention, causal-conv1d, mamba-ssm) compute them; "
        "they get the",
        "sequence boundaries instead of padded rows if a trial at the start shows that they heed "
        "them. This has",
        "not been tried on a GPU. Without the packages such layers are slow and need much memory. "
        "Layouts with",
        "`t` or `c` are refused for such models. LoRA leaves out `dt_proj` and `out_proj` of "
        "Mamba layers. Beside",
        "experts whose weights are one tensor, LoRA leaves out linear layers that are named like "
        "the experts'",
        "(`gate_proj`, `up_proj`, `down_proj`), and it adapts no expert.",
        "",
        "A checkpoint of several models (text and vision, say) trains its text model. Its other "
        "towers are not",
        "loaded: they stay on disk, and every export and published version has them as they came, "
        "under the",
        "checkpoint's own names and configuration. The towers of `qwen2_vl`, `qwen2_5_vl` and "
        "`qwen3_vl` are",
        "loaded, because images train with them.",
        "",
        "Attention whose indexer picks the keys of each query (`indexed attention`: DeepSeek V3.2, "
        "GLM-5) is",
        "computed by the architecture's own functions too, on whole sequences, eagerly: its memory "
        "grows with the",
        "square of a sequence's length. The indexer is frozen. Sparse attention of other kinds "
        "(DeepSeek V4,",
        "MiniMax M3) is refused: it attends to blocks or to compressed keys, for which there is no "
        "such function yet.",
        "",
        "Layers that attend in chunks (Llama 4) cut each sequence at multiples of the model's "
        "`attention_chunk_size`,",
        "counted from its own start; whole chunks of a common prefix attend once. Where a layer "
        "scales queries by",
        "position, the position counts in the sequence too. A layout may have `c`. Layouts with "
        "`t` or `e` are",
        "refused for Llama 4: in transformers, each of its experts computes every token, which "
        "costs time and memory.",
        "",
        "Among these are also models with sliding windows, softcaps on attention and logits, "
        "attention sinks, logit",
        "scales, latent attention and experts. Dropout and router jitter are turned off. With "
        "`longrope` or",
        "dynamic NTK rope, the trainer refuses sequences beyond the length that the rope was "
        "trained on, because",
        "transformers would apply the longest sequence's rope to all sequences of a micro-batch.",
        "",
        "In a mixture of experts, rounding makes the trainer's router choose other experts than",
        "the server's for some tokens. [Router replay](router-replay.md) gives the trainer the",
        "server's choice.",
        "",
        "The CPU engine serves each of these models. For Qwen2, Llama, Qwen2-VL and Qwen2.5-VL it",
        "has a fast decoder. transformers computes the others: slowly, without images, and in",
        "float32 with logprobs within 1e-4 nats of transformers' own. A token costs one forward",
        "pass of one token, in which requests of the same length share; for `nemotron_h` and",
        "`zamba2`, whose caches give other logits, it costs one of the whole sequence",
        "([areal-inference](../services/areal_inference/README.md#other-architectures)).",
        "",
        *table(RIGHT),
        "",
        f"## Refused ({count(REFUSED)})",
        "",
        "A run with one of these models stops at the start and prints the reason. "
        "Lengths in the table are those of the tiny test models.",
        "",
        *table(REFUSED, notes="why"),
        "",
        f"## Not tried ({count(NOT_TRIED)})",
        "",
        "No tiny version of these models could be made. The comparison at the start of a run "
        "decides whether such a model can be trained.",
        "",
        *table(NOT_TRIED, notes="why"),
        "",
    ]
    return "\n".join(lines)


def main(model_types: list[str]) -> int:
    """Tries all, or those named; returns the exit code."""
    torch.set_num_threads(1)
    rows = []
    for model_type in model_types or registry():
        rows.append(try_architecture(model_type))
        if rows[-1].result == RIGHT:  # another set of weights and tokens
            again = try_architecture(model_type, seed=1)
            rows[-1] = rows[-1] if again.result == RIGHT else again
        row = rows[-1]
        print(f"{row.model_type:26s} {row.result:10s} {row.note}", flush=True)
    if not model_types:
        PAGE.write_text(render(rows))
    return int(any(row.result == WRONG for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
