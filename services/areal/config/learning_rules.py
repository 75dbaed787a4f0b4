"""Signs that a run cannot learn: one table of rules over the configuration and the step rows.

    configuration ──> of_config ──┐
                                  ├──> Finding: what is seen, and what to do
    metrics.jsonl ──> of_rows ────┘

Pure functions. `areal check`, `areal run` and the trainer show what `of_config` finds; the live
view, the summary and the dashboard also show what `of_rows` finds in the steps so far. A rule must
stay silent in a run that learns: it compares a run with its own beginning, waits for enough rows,
and has nothing to say where the rewards are near the best that the run has seen.
docs/runbooks/reward-does-not-rise.md contains the table.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from areal.config.experiment import GRPOConfig
    from areal.config.training import PPOActorConfig

PAGE = "docs/runbooks/reward-does-not-rise.md"
WINDOW = 20
"""Steps over which rewards and shares are averaged, everywhere they are shown."""
MISMATCH_BOUND = 0.05
"""Highest KL divergence between engine and trainer, in nats per token: bfloat16 on both sides stays
below 0.01."""
HIGHEST_LR = 1e-2
"""Highest learning rate of AdamW, whose steps are about as large as the learning rate, on weights
of around 0.02."""
HIGHEST_LORA_LR = 1e-1
_FEW, _ENOUGH = 10, 20
"""Rows that a share needs, and rows that a comparison of two halves needs."""
_SIGMAS = 5.0
"""Standard errors by which two means must differ. A run is looked at after each of its steps, so
chance has thousands of tries."""

_ABSURD = 1e100
"""No metric reaches it, and squares of what is below it are finite."""

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Finding:
    """One sign that a run cannot learn."""

    rule: str
    seen: str
    advice: str

    def __str__(self) -> str:
        return f"{self.seen}; {self.advice}"

    def as_dict(self) -> dict[str, str]:
        """Returns the fields as summary.json and the dashboard have them."""
        return asdict(self)


@dataclass(frozen=True)
class Rule:
    """One line of the table; a check returns what is seen, or "" if all is well."""

    name: str
    shown_when: str
    """The condition, for docs/learning.md."""
    advice: str
    config: Callable[[GRPOConfig], str] | None = None
    rows: Callable[[Sequence[Row]], str] | None = None


def of_config(config: GRPOConfig) -> list[Finding]:
    """Returns what is wrong with a configuration, before anything starts."""
    return [
        Finding(rule.name, seen, rule.advice)
        for rule in RULES
        if rule.config is not None and (seen := rule.config(config))
    ]


def of_rows(rows: Sequence[Row]) -> list[Finding]:
    """Returns what is wrong now with a run.

    Args:
        rows: Of metrics.jsonl, from the run's first step on, oldest first. Values that are missing
            or not finite numbers are left out.
    """
    if not rows:
        return []
    return [
        Finding(rule.name, seen, rule.advice)
        for rule in RULES
        if rule.rows is not None and (seen := rule.rows(rows))
    ]


def of_run(expected: Sequence[Finding], rows: Sequence[Row]) -> list[Finding]:
    """Returns what is wrong with a run: what its rows say is right where both could tell.

    Args:
        expected: From `of_config`.
        rows: As for `of_rows`.
    """
    seen_in_rows = {rule.name for rule in RULES if rule.rows is not None} if rows else set()
    return [each for each in expected if each.rule not in seen_in_rows] + of_rows(rows)


# -- what rows say ------------------------------------------------------------------------------


def figures(rows: Sequence[Row], key: str) -> list[float]:
    """Returns a key's numbers; rows without one, or with one that none can be, are skipped."""
    return [
        float(value)
        for row in rows
        if isinstance(value := row.get(key), int | float) and abs(value) < _ABSURD
    ]


def _share(rows: Sequence[Row], key: str, least: int = _FEW) -> float:
    """The mean of a key over the last steps; 0 before there are `least` of them."""
    values = figures(rows[-WINDOW:], key)
    return fmean(values) if len(values) >= least else 0.0


def _solved(rows: Sequence[Row]) -> bool:
    """Whether rewards are near the highest that a sample has had, and samples have differed.

    Then equal rewards, and answers that are all alike, are what was wanted.
    """
    low = min(figures(rows, "reward/lowest"), default=0.0)
    high = max(figures(rows, "reward/highest"), default=0.0)
    recent = figures(rows[-WINDOW:], "reward/mean")
    return bool(recent) and high > low and fmean(recent) >= low + 0.9 * (high - low)


def _halves(rows: Sequence[Row], key: str) -> tuple[list[float], list[float]]:
    """A key's values in the first and in the last steps; both empty before there are enough."""
    values = figures(rows, key)
    count = min(WINDOW, len(values) // 2)
    return (values[:count], values[-count:]) if len(values) >= _ENOUGH else ([], [])


def _error(first: Sequence[float], last: Sequence[float]) -> float:
    """The standard error of the difference of two means.

    Noise is what neighbors differ by (von Neumann 1941), so a trend within the steps is none.
    """
    return math.sqrt(sum(_noise(values) / len(values) for values in (first, last)))


def _noise(values: Sequence[float]) -> float:
    return fmean((b - a) ** 2 for a, b in itertools.pairwise(values)) / 2


# -- rules over the configuration ---------------------------------------------------------------


def needs_several(actor: PPOActorConfig) -> bool:
    """Whether the reward of a sample without others in its group is normalized to 0."""
    return (actor.reward_norm or "").partition("/")[0] in ("group", "leave1out")


def computes_advantages(config: GRPOConfig) -> bool:
    """Whether the experiment's recipe does, as far as its source says; True without a recipe.

    Recipes that only evaluate, or learn from a teacher or from rows, do not.
    """
    if config.offline:
        return False
    return not config.recipe or b"compute_advantages" in _source(config)


def _source(config: GRPOConfig) -> bytes:
    try:
        return Path(config.recipe).read_bytes() if config.recipe else b""
    except OSError:  # whoever loads it says so
        return b""


def single_samples(config: GRPOConfig, n_samples: int) -> str:
    """Returns why a group of `n_samples` cannot be learned from; "" if it can."""
    if n_samples > 1 or not needs_several(config.actor):
        return ""
    return (
        f"gconfig.n_samples {n_samples}: expected 2 or more with actor.reward_norm "
        f"{config.actor.reward_norm} (algorithm {config.algorithm}), which compares the samples of "
        "a group: a single one has advantage 0"
    )


def _one_sample(config: GRPOConfig) -> str:
    """Silent where the recipe chooses the number itself, if only for some workflows."""
    if not computes_advantages(config) or b"n_samples" in _source(config):
        return ""
    return single_samples(config, config.gconfig.n_samples)


def _learning_rate(config: GRPOConfig) -> str:
    actor = config.actor
    limit = HIGHEST_LR if actor.lora is None else HIGHEST_LORA_LR
    rates = [("actor.optimizer.lr", actor.optimizer.lr, limit)] if actor.optimizer else []
    if config.critic is not None:
        rates.append(("critic.lr", config.critic.lr, HIGHEST_LR))
    for key, rate, highest in rates:
        if rate == 0:
            return f"{key} 0: nothing is learned"
        if rate > highest:
            return (
                f"{key} {rate:g}: expected at most {highest:g}, because each step of AdamW moves a "
                "weight by about the learning rate"
            )
    return ""


# -- rules over the rows ------------------------------------------------------------------------


def _single_groups(rows: Sequence[Row]) -> str:
    """The metric counts a group of one only where the norm makes its advantage 0."""
    recent = rows[-WINDOW:]
    samples, groups = figures(recent, "samples"), figures(recent, "groups")
    equal = figures(recent, "group/zero_std")
    if not samples or samples != groups or len(equal) != len(samples) or min(equal) < 1:
        return ""
    return f"each group has one sample, so all advantages of step {_step(rows)} are 0"


def _never_updated(rows: Sequence[Row]) -> str:
    """An update has a loss even if its gradient was not finite; the critic's warm-up has none."""
    recent = [row for row in rows[-WINDOW:] if figures([row], "samples")]
    if not recent or any(_has_loss(row) or row.get("critic/warmup") for row in rows[-WINDOW:]):
        return ""
    first, last = _step(recent[:1]), _step(recent)
    steps = f"step {last}" if first == last else f"steps {first} to {last}"
    return f"{steps}: a batch was taken, but the policy was not updated (no train/loss)"


def _has_loss(row: Row) -> bool:
    """Whether the policy was updated: by an engine, or by the recipe, which recorded a loss."""
    return any(name.endswith("/loss") and name != "critic/loss" for name in row)


def _equal_rewards(rows: Sequence[Row]) -> str:
    """Where rewards are compared with other groups too, advantages are not small."""
    share = _share(rows, "group/zero_std")
    enough = len(figures(rows[-WINDOW:], "group/zero_std")) >= WINDOW
    if not (share == 1 or (share > 0.8 and enough)) or _share(rows, "train/advantage_abs") > 0.5:
        return ""
    if _single_groups(rows) or _solved(rows):
        return ""
    return (
        f"in {share:.0%} of the last groups all rewards are equal (group/zero_std), so these "
        "groups have no gradient"
    )


def _no_advantage(rows: Sequence[Row]) -> str:
    idle = [row for row in rows[-WINDOW:] if row.get("train/advantage_abs") == 0]
    if not idle or _single_groups(rows) or _equal_rewards(rows) or _solved(rows):
        return ""
    many = f" ({len(idle)} of the last {len(rows[-WINDOW:])} steps are like this)"
    return (
        f"step {_step(idle)}: all advantages are 0 (train/advantage_abs), so the rewards changed "
        f"nothing{many * (len(idle) > 1)}"
    )


def _cut_off(rows: Sequence[Row]) -> str:
    share = _share(rows, "rollout/truncated")
    if share <= 0.5 or _solved(rows):
        return ""
    length = max(figures(rows[-WINDOW:], "rollout/length_max"), default=0)
    return f"{share:.0%} of the last answers are cut off (rollout/truncated) at {length:.0f} tokens"


def _reward_fell(rows: Sequence[Row]) -> str:
    """Compared with the best of the windows before the last one."""
    values = figures(rows, "reward/mean")
    _, last = _halves(rows, "reward/mean")
    if not last:
        return ""
    count = len(last)
    earlier = [values[at : at + count] for at in range(0, len(values) - 2 * count + 1, count)]
    best = max(earlier, key=fmean)
    was, now, low = fmean(best), fmean(last), min([0.0, *figures(rows, "reward/lowest")])
    if now - low > (was - low) / 3 or was - now <= _SIGMAS * _error(best, last):
        return ""
    return f"the reward fell from {was:.3f} to {now:.3f} (means of {count} steps)"


def _entropy_fell(rows: Sequence[Row]) -> str:
    """A policy that learns loses entropy too, but its reward rises."""
    first, last = _halves(rows, "policy/entropy")
    if not first or not fmean(last) < 0.1 * fmean(first):
        return ""
    before, after = _halves(rows, "reward/mean")
    rose = before and fmean(after) - fmean(before) > 2 * _error(before, after)
    if not before or rose or _solved(rows):
        return ""
    return (
        f"the policy's entropy fell from {fmean(first):.3g} to {fmean(last):.3g} nats, and the "
        "reward did not rise"
    )


def _ratios_far_off(rows: Sequence[Row]) -> str:
    for key, what in (
        ("policy/clip_ratio", "have a clipped ratio"),
        ("policy/behavior_weight_capped", "have a behavior weight above the cap"),
    ):
        if (share := _share(rows, key)) > 0.5:
            return f"{share:.0%} of the tokens {what} ({key})"
    weights = figures(rows[-WINDOW:], "policy/behavior_weight")
    if len(weights) >= _FEW and not 0.2 <= fmean(weights) <= 3:
        return f"policy/behavior_weight is {fmean(weights):.3g} on average: expected about 1"
    return ""


def _mismatch(rows: Sequence[Row]) -> str:
    for row in reversed(rows):
        if known := figures([row], "mismatch/kl"):
            if known[0] <= MISMATCH_BOUND:
                return ""
            return (
                f"step {_step([row])}: engine and trainer disagree on logprobs, mismatch/kl "
                f"{known[0]:.3g} above {MISMATCH_BOUND:g}"
            )
    return ""


def _step(rows: Sequence[Row]) -> int:
    return int(rows[-1].get("step", len(rows)))


RULES = (
    Rule(
        "one_sample_per_group",
        "The rewards are compared within a group (`actor.reward_norm` is `group/…` or "
        "`leave1out/…`), and a group has one sample. `areal run` refuses to start if the workflow "
        "is `RLVRWorkflow`, because then it is certain; other workflows may form groups themselves",
        "set gconfig.n_samples to 8, or an algorithm without groups (algorithm=reinforce_pp)",
        config=_one_sample,
        rows=_single_groups,
    ),
    Rule(
        "learning_rate",
        f"`actor.optimizer.lr` or `critic.lr` is 0 or above {HIGHEST_LR:g} "
        f"({HIGHEST_LORA_LR:g} with `actor.lora`)",
        "set a common rate: 1e-6 for a pretrained model, 1e-5 with LoRA, 3e-4 for a tiny one",
        config=_learning_rate,
    ),
    Rule(
        "no_update",
        f"None of the last {WINDOW} steps, which took batches of rollouts, has a `train/loss` (or "
        "a loss that the recipe recorded), and none belongs to the critic's warm-up",
        "call actor.ppo_update(batch), actor.distill or actor.engine.train_batch between "
        "prepare_batch and upload_weights; with an optimizer of your own, "
        'actor.record({"own/loss": loss})',
        rows=_never_updated,
    ),
    Rule(
        "equal_rewards",
        f"`group/zero_std` is above 0.8 on average over {WINDOW} steps, or 1 in {_FEW} to {WINDOW} "
        "steps, while advantages are small and rewards are not near the highest seen",
        "look at answers with areal show --step N, then use rows that the model solves sometimes, "
        "a reward with parts (docs/rewards.md), or more samples per group",
        rows=_equal_rewards,
    ),
    Rule(
        "no_advantage",
        f"`train/advantage_abs` is 0 in one of the last {WINDOW} steps, while rewards are not near "
        "the highest seen",
        "rewards differ in a step with more groups (train_dataset.batch_size) or more samples "
        "(gconfig.n_samples)",
        rows=_no_advantage,
    ),
    Rule(
        "answers_cut_off",
        f"`rollout/truncated` is above 0.5 on average over {_FEW} to {WINDOW} steps, while rewards "
        "are not near the highest seen",
        "raise gconfig.max_new_tokens (and model.context_length), or ask for shorter answers",
        rows=_cut_off,
    ),
    Rule(
        "reward_collapsed",
        f"The mean reward of the last {WINDOW} steps (of half of the steps, if there are fewer "
        f"than {2 * WINDOW}) is below a third of the best earlier one, and the difference is above "
        f"{_SIGMAS:g} standard errors",
        "if the rows did not become harder, go back to an earlier version (areal versions) with a "
        "lower actor.optimizer.lr or a smaller rollout.max_head_offpolicyness",
        rows=_reward_fell,
    ),
    Rule(
        "entropy_collapsed",
        "`policy/entropy` is below a tenth of that of the first steps, and the reward has not "
        "risen since",
        "lower actor.optimizer.lr, or set actor.entropy_ctl to 0.001 or actor.kl_loss_ctl to 0.01",
        rows=_entropy_fell,
    ),
    Rule(
        "ratios_far_off",
        f"Over {_FEW} to {WINDOW} steps, more than half of the tokens are clipped "
        "(`policy/clip_ratio`) or capped (`policy/behavior_weight_capped`), or the mean of "
        "`policy/behavior_weight` is below 0.2 or above 3",
        "lower actor.optimizer.lr, rollout.max_head_offpolicyness or actor.ppo_n_minibatches",
        rows=_ratios_far_off,
    ),
    Rule(
        "logprob_mismatch",
        f"`mismatch/kl` of the newest step that has one is above {MISMATCH_BOUND:g}",
        "see docs/runbooks/logprob-mismatch.md",
        rows=_mismatch,
    ),
)
