"""The rows of docs/learning.md: each is an example, its overrides, and the goal of its runs.

A new row is a new entry of ROWS. Its recipe records the measured result with `rollout.evaluate(...,
name=NAME)` or `session.record(NAME, ...)`: both end in the run's trainer.json.
"""

from __future__ import annotations

import ast
import hashlib
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Measure:
    """How a run is judged: by results in its trainer.json, and bounds on them."""

    after: str = "heldout_after"
    before: str = "heldout_before"
    """Subtracted from `after`; empty: nothing is."""
    goal: str = ""
    """If given, the value is the share of the gap from `before` to `goal` that `after` closes."""
    least: float | None = 0.3
    most: float | None = None
    curve: str = "reward/mean"
    """Key of metrics.jsonl whose curve is drawn."""

    def __str__(self) -> str:
        """E.g. `heldout_after - heldout_before >= 0.3`."""
        what = f"{self.after} - {self.before}" if self.before else self.after
        if self.goal:
            what = f"({self.before} - {self.after}) / ({self.before} - {self.goal})"
        bounds = [f">= {self.least}"] if self.least is not None else []
        bounds += [f"<= {self.most}"] if self.most is not None else []
        return f"{what} {' and '.join(bounds)}" if bounds else what

    def value(self, results: dict[str, float]) -> float:
        """Returns the value that is compared with the bounds, from the results in trainer.json."""
        after = results[self.after]
        if self.goal:
            before = results[self.before]
            return (before - after) / (before - results[self.goal])
        return after - (results[self.before] if self.before else 0.0)

    def holds(self, value: float) -> bool:
        """Whether a value is within the bounds."""
        above = self.least is None or value >= self.least
        return above and (self.most is None or value <= self.most)


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    """Letters, digits and dashes; it is part of a run's name."""
    title: str
    section: str
    overrides: tuple[str, ...] = ()
    example: str = "arithmetic_grpo"
    measure: Measure = Measure()
    against: str = ""
    """Name of the row that this row is compared with; empty: none."""
    packages: str = ""
    """Folder of PACKAGES that the example imports from; empty: the environment has everything."""

    def revision(self) -> str:
        """Returns a hash of the recipe's code (without comments), its settings and overrides."""
        recipe = ROOT / "examples" / self.example
        code = code_alone(recipe.with_suffix(".py").read_text())
        settings = repr(yaml.safe_load(recipe.with_suffix(".yaml").read_text()))
        parts = (code, settings, *self.overrides)
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:10]


def code_alone(source: str) -> str:
    """Returns Python source without comments and docstrings: rewording them changes no result."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [each for each in node.body if not _is_text(each)] or [ast.Pass()]
    return ast.unparse(tree)


def _is_text(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def _algorithm(name: str, title: str, *overrides: str) -> Row:
    return Row(name.replace("_", "-"), title, FAMILY, (f"algorithm={name}", *overrides))


def _staleness(eta: int, *overrides: str, kind: str = "", title: str = "decoupled") -> Row:
    """The learning rate is the recipe's if `kind` is empty or `plain`, and half of it otherwise."""
    gentle = kind.startswith("half")
    suffix = f"-{kind}" if kind else ""
    overrides = (f"rollout.max_head_offpolicyness={eta}", *(GENTLE if gentle else ()), *overrides)
    synchronous = "eta-0-half" if gentle else "eta-0"
    return Row(
        f"eta-{eta}{suffix}",
        f"η = {eta}, {title}{'' if gentle else ', full rate'}",
        ASYNCHRONY if gentle else FAST,
        overrides,
        against=synchronous if eta else "",
    )


def _rows_alone(
    example: str, title: str, measure: Measure, lora_lr: str = "", name: str = ""
) -> Row:
    overrides = ("actor.lora={}", f"actor.optimizer.lr={lora_lr}") if lora_lr else ()
    return Row(name or example.replace("_", "-"), title, OFFLINE, overrides, example, measure)


def _architecture(name: str, title: str, *control: str) -> Row:
    return Row(
        f"{name.replace('_', '-')}{'-control' if control else ''}",
        title,
        ARCHITECTURES,
        (f"architecture={name}", *control),
        "arithmetic_models",
        STILL if control else Measure(),
    )


def _task(example: str, title: str, measure: Measure, *overrides: str, packages: str = "") -> Row:
    name = example.replace("_", "-") + ("-control" if "control=true" in overrides else "")
    return Row(name, title, TASKS, overrides, example, measure, packages=packages)


AGENTS_SDK = "build/agents-sdk"
PACKAGES = {AGENTS_SDK: "make test-agents-sdk"}
"""Folders of packages that the environment does not have, and the command that fills each."""

FAMILY = "Algorithms"
ARCHITECTURES = "Architectures"
ASYNCHRONY = "Asynchrony"
FAST = "Asynchrony at the full rate"
PLAIN = "actor.prox_logp_method=behavior"
OFFLINE = "Dataset rows only"
TASKS = "Other tasks"

GENTLE = ("actor.optimizer.lr=1.5e-4", "total_train_steps=400")
"""Half the learning rate and twice the steps: the policy moves equally far, in smaller steps."""

ACCURACY = Measure("heldout_accuracy", before="", least=0.9, curve="train/loss")
# The answer follows from the question, except for the few sums that no training row has.
LOSS = Measure("heldout_loss_after", before="", least=None, most=0.1, curve="train/loss")
TEACHER = Measure(
    "heldout_loss_after",
    "heldout_loss_before",
    "heldout_loss_teacher",
    least=0.8,
    curve="train/loss",
)

SCORE = Measure("score_after", "score_before", least=0.5)
"""The score is the reward model's, in nats."""
STILL = Measure(least=None, most=0.05)

ROWS = [
    _algorithm("grpo", "GRPO"),
    Row(
        "control",
        "GRPO, shuffled rewards (control)",
        FAMILY,
        ("control=true",),
        measure=STILL,
    ),
    Row("ppo-critic", "PPO with a critic", FAMILY, example="ppo_critic"),
    _algorithm("rloo", "RLOO"),
    _algorithm("reinforce_pp", "REINFORCE++"),
    _algorithm("dr_grpo", "Dr. GRPO"),
    _algorithm("dapo", "DAPO"),
    _algorithm("gspo", "GSPO"),
    _algorithm("cispo", "CISPO"),
    Row(
        "lora",
        "GRPO, only LoRA adapters",
        FAMILY,
        ("actor.lora={}", "actor.optimizer.lr=3e-3"),
        measure=Measure(least=0.27),  # 80 % of what full training rises by
    ),
    Row(
        "muon",
        "GRPO with Muon",
        FAMILY,
        ("actor.optimizer.type=muon", "actor.optimizer.lr=1e-3"),
    ),
    _architecture("qwen3_moe", "Mixture of experts (Qwen3-MoE)"),
    _architecture("qwen3_moe", "Mixture of experts, shuffled rewards (control)", "control=true"),
    _architecture("qwen3_5", "Delta rule, unused vision tower (Qwen3.5)"),
    _architecture("qwen3_5", "Delta rule, shuffled rewards (control)", "control=true"),
    *[_staleness(eta, kind="half") for eta in (0, 1, 2, 4, 8)],
    _staleness(8, PLAIN, kind="half-plain", title="plain PPO"),
    *[_staleness(eta) for eta in (0, 1, 2, 4, 8)],
    _staleness(8, PLAIN, kind="plain", title="plain PPO"),
    _task("own_loss", "A loss and advantages of the recipe's own", Measure(least=0.15)),
    _task("own_loss", "An own loss, shuffled rewards (control)", STILL, "control=true"),
    _task("clevr_count", "Vision: counting squares", Measure(least=0.1)),
    _task("clevr_count", "Vision, shuffled rewards (control)", STILL, "control=true"),
    _task("tldr", "Summaries, judged by a reward model", SCORE),
    _task("guess_number", "Environment: a digit in four tries", Measure(least=0.15)),
    _task("guess_number", "Environment, shuffled rewards (control)", STILL, "control=true"),
    _task("multi_turn_math", "Several tries: sums with feedback", Measure(least=0.15)),
    _task("multi_turn_math", "Several tries, shuffled rewards (control)", STILL, "control=true"),
    _task("tool_calculator", "A tool: products by a calculator", Measure(least=0.15)),
    _task("tool_calculator", "A tool, shuffled rewards (control)", STILL, "control=true"),
    _task("code_rl", "Code: expressions that pass tests", Measure(least=0.15)),
    _task("code_rl", "Code, shuffled rewards (control)", STILL, "control=true"),
    _task("search_agent", "Agent: searches documents, then answers", Measure(least=0.15)),
    _task("search_agent", "Agent, shuffled rewards (control)", STILL, "control=true"),
    _task("openai_agent", "Agent on OpenAI's API: sums in two tries", Measure(least=0.15)),
    _task("openai_agent", "OpenAI's API, shuffled rewards (control)", STILL, "control=true"),
    _task("anthropic_agent", "Agent on Anthropic's API: sums in two tries", Measure(least=0.15)),
    _task("anthropic_agent", "Anthropic's API, shuffled rewards (control)", STILL, "control=true"),
    _task(
        "openai_agents_sdk",
        "Agent on OpenAI's Agents SDK: sums in two tries",
        Measure(least=0.15),
        packages=AGENTS_SDK,
    ),
    _task(
        "openai_agents_sdk",
        "OpenAI's Agents SDK, shuffled rewards (control)",
        STILL,
        "control=true",
        packages=AGENTS_SDK,
    ),
    _task("on_policy_distill", "On-policy distillation", Measure()),
    _task("reasoning_gym", "reasoning-gym's spell_backward", Measure(least=0.15)),
    _task("reasoning_gym", "reasoning-gym, shuffled rewards (control)", STILL, "control=true"),
    _rows_alone("gsm8k_sft", "SFT", LOSS),
    _rows_alone("dpo", "DPO", ACCURACY),
    _rows_alone("dpo", "DPO, LoRA", ACCURACY, lora_lr="3e-3", name="dpo-lora"),
    _rows_alone("distill", "Distillation", TEACHER),
    _rows_alone("reward_model", "Reward model", ACCURACY),
    _rows_alone("reward_model", "Reward model, LoRA", ACCURACY, lora_lr="3e-3", name="reward-lora"),
]
