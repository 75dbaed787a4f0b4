"""What the kit measures, in this order, and the seconds that each case may take.

The cheapest information comes first. Limits add up to `BUDGET_S`, so that the whole kit fits into
ten minutes; a case may also use the time that the cases before it left.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

BUDGET_S = 520.0
Setting = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """Tries of one kind."""

    name: str
    module: str
    """The file in cases/ whose `measure(setting, miniature)` computes the figures of a try."""
    limit_s: float
    """Seconds for all tries together."""
    settings: tuple[Setting, ...]
    try_s: float = BUDGET_S
    """Seconds for one try, where a hang must leave time for the next."""
    smaller: Setting = field(default_factory=dict)
    """Settings with which a try that runs out of memory is repeated."""
    fresh: bool = False
    """Whether it starts in a new process: Liger patches an architecture for a whole process."""


_FAMILIES = ("qwen2.5-0.5b", "qwen3-8b", "qwen3-30b-a3b")
# One of each kind of layer; those whose kernels are compiled by Triton come last.
_ARCHITECTURES = (
    *("gemma3_text", "llama4_text", "deepseek_v3", "gpt_oss", "glm4_moe"),
    *("lfm2", "bamba", "kimi_linear", "qwen3_5_text"),
)
_EVEN: Setting = {"tokens": 16384, "lengths": "even"}
_SMALL: Setting = {"shape": "qwen2.5-0.5b"}
_MIDDLE: Setting = {"shape": "qwen2.5-1.5b", **_EVEN}
_MIXED: Setting = {"tokens": 16384, "lengths": "long"}
# One sequence, all of which is trained on, as in prime-rl's benchmarks.
_16K: Setting = {"tokens": 16384, "lengths": "one"}
_64K: Setting = {"tokens": 65536, "lengths": "one"}

CASES = (
    Case("imports", "machine", 24, ({"of": "versions"}, {"of": "matmul"}, {"of": "copies"})),
    Case(
        "primitives",
        "primitives",
        20,
        (
            {"of": "attention", "heads": "14/2", "width": 64},
            {"of": "attention", "heads": "16/4", "width": 128},
            {"of": "attention", "heads": "16/4", "width": 128, "window": 50},
            {"of": "attention", "heads": "16/4", "width": 128, "shared": True},
            {"of": "race", "heads": "16/8", "width": 128, "tokens": 16384},
            {"of": "race", "heads": "16/8", "width": 128, "tokens": 2048},
            {"of": "long", "heads": "14/2", "width": 64},
            {"of": "long", "heads": "16/8", "width": 128},
            {"of": "mm_out_dtype"},
            {"of": "addmm_out_dtype"},
            {"of": "adamw_dtensor"},
            {"of": "foreach_mul"},
            {"of": "pinned_copies"},
            {"of": "selective_keeps_attention"},
            {"of": "grouped_mm"},
            {"of": "nccl"},
        ),
        try_s=10,
    ),
    Case(
        "contact",
        "contact",
        45,
        (
            *({"shape": shape, "dtype": "float32", "kernel": "packed"} for shape in _FAMILIES),
            *(
                {"shape": shape, "kernel": kernel, "recompute": mode}
                for kernel in ("varlen", "packed")
                for shape in _FAMILIES
                for mode in ("none", "selective", "full", "offload")
            ),
            *(
                {"shape": shape, "kernel": "varlen_cudnn", "recompute": mode}
                for shape in _FAMILIES[:2]
                for mode in ("none", "selective")
            ),
            *(
                {**_SMALL, "with": part}
                for part in ("offload", "lora", "ref", "critic", "muon", "resume", "export", "oom")
            ),
        ),
        try_s=40,  # the first one imports as much again
    ),
    Case(
        "families",
        "contact",
        40,
        tuple(
            {"architecture": kind, "dtype": dtype}
            for kind in _ARCHITECTURES
            for dtype in ("float32", "bfloat16")
        ),
        try_s=30,
    ),
    Case("step", "speed", 18, ({**_MIDDLE, "profile": True},), smaller={"layers": 8}),
    Case("head", "head", 6, tuple({"tokens": 8192, "chunk": c} for c in (441, 2048, 4096, 8192))),
    Case(
        "widths",
        "speed",
        30,
        (
            {**_SMALL, **_EVEN, "profile": True},
            {**_SMALL, **_MIXED},
            {"shape": "qwen2.5-7b", "layers": 8, **_EVEN},
            {**_MIDDLE, "again": True},  # its difference from `step` is the noise
        ),
        smaller={"layers": 4},
    ),
    # The five rows that prime-rl publishes for one H100.
    Case(
        "prime",
        "speed",
        110,
        (
            {"shape": "qwen3-0.6b", **_16K, "loss": "rl"},
            {"shape": "qwen3-0.6b", **_64K, "loss": "rl"},
            {"shape": "qwen3-0.6b", **_16K, "loss": "sft"},
            {"shape": "qwen3-4b", **_16K, "loss": "rl", "lora": True},
            {"shape": "qwen3-4b", **_64K, "loss": "rl", "lora": True},
            {"shape": "qwen3-0.6b", **_64K, "loss": "rl", "attention": "varlen"},
        ),
    ),
    Case(
        "modes",
        "speed",
        25,
        (
            {**_MIDDLE, "recompute": "selective", "profile": True},
            {**_MIDDLE, "recompute": "full"},
            {**_MIDDLE, "recompute": "offload"},
            {"shape": "qwen3-4b", **_16K, "loss": "rl", "lora": True, "recompute": "full"},
        ),
    ),
    Case(
        "kernels",
        "speed",
        55,
        (
            {**_MIDDLE, "kernels": "eager"},
            {"shape": "qwen3-0.6b", **_16K, "loss": "rl", "kernels": "eager"},
            {**_MIDDLE, "kernels": "compile", "vary": True},
            {"shape": "qwen3-0.6b", **_16K, "loss": "rl", "kernels": "compile"},
        ),
        fresh=True,
    ),
    Case(
        "attention",
        "speed",
        12,
        tuple({**_MIDDLE, "lengths": "groups", "share": on} for on in (True, False)),
    ),
    Case("checkpoint", "checkpoint", 30, (_SMALL,)),
    Case("turns", "turns", 10, ({"shape": "qwen2.5-1.5b"},)),
    Case(
        "moe",
        "speed",
        6,
        ({"shape": "qwen3-30b-a3b", "layers": 4, **_EVEN},),
        smaller={"layers": 2},
    ),
    Case("recurrent", "speed", 20, ({"shape": "qwen3.5-9b", "layers": 4, **_EVEN},)),
    Case("plain", "plain", 14, (_MIDDLE,), smaller={"layers": 8}),
    Case(
        "rest",
        "rest",
        55,
        (
            {"steps": 20},
            {"steps": 20, "mode": "alternating"},
            {"steps": 20, "servers": "sglang", "ahead": 0},
            {"steps": 20, "servers": "sglang", "mode": "alternating"},
            {"steps": 6, "servers": "sglang", "answer": 448},
        ),
    ),
)
NAMES = tuple(case.name for case in CASES)


def find(name: str) -> Case:
    """Returns the case with this name."""
    return CASES[NAMES.index(name)]
