"""All metrics of a step: names, units and meanings, as metrics.jsonl, trackers and views have them.

Engines describe one update and know nothing about a run; their statistics get the run's names here.
Rows of earlier releases use the same names as those statistics, so this table renames them as well.
docs/metrics.md is generated from this table, and tests compare it with the rows of real runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from areal.errors import InvalidInput


@dataclass(frozen=True)
class Metric:
    """One name in a row."""

    name: str
    """`NAME` in it stands for any name: of a part of the reward, of an evaluation."""
    unit: str
    """"": a number without a unit."""
    meaning: str
    statistics: tuple[str, ...] = ()
    """Names under which engines, or rows of earlier releases, have the metric."""


def _time(part: str, meaning: str, *statistics: str) -> Metric:
    return Metric(f"time/{part}", "s", meaning, statistics or (f"{part}_seconds",))


METRICS: dict[str, tuple[Metric, ...]] = {
    "Batch": (
        Metric("step", "steps", "finished train steps, including this one"),
        Metric("incarnation", "", "the trainer's incarnation, which grows with each start"),
        Metric("policy_version", "", "the version that this step produced; equals `step`"),
        Metric("time", "s", "Unix time at which the step ended"),
        Metric("groups", "", "groups in the batch, over all ranks"),
        Metric("samples", "", "trajectories in the batch, over all ranks", ("n_sequences",)),
        Metric("tokens_total", "tokens", "tokens in the batch, including prompts"),
        Metric(
            "reward/mean",
            "",
            "mean of the trajectories' rewards, before any shaping",
            ("reward", "reward_mean"),
        ),
        Metric(
            "reward/std", "", "standard deviation of the trajectories' rewards", ("reward_std",)
        ),
        Metric("reward/lowest", "", "lowest reward of a trajectory", ("reward_lowest",)),
        Metric("reward/highest", "", "highest reward of a trajectory", ("reward_highest",)),
        Metric(
            "reward/NAME",
            "",
            "mean of a part of the reward, before weighting ([rubric](rewards.md#several-parts))",
        ),
        Metric(
            "reward/timeouts",
            "answers",
            "answers of the batch that a built-in reward scored 0 because they would take too long "
            "to judge ([rewards](rewards.md#built-in-rewards))",
        ),
        Metric(
            "rollout/splits",
            "trajectories",
            "trajectories of the batch that repeat the history of an earlier one of their attempt "
            "instead of continuing it, since the agent changed the history "
            "([agents](agents.md#frameworks-that-split-conversations))",
        ),
        Metric(
            "rollout/splits/NAME",
            "trajectories",
            "those of `rollout/splits` in which the field NAME of a message (`content`, "
            "`tool_calls.function.arguments`, …), or `tools`, is what the agent changed first; "
            "absent if there are none",
        ),
        Metric(
            "rollout/splits_message",
            "",
            "number, from 0, of the earliest message that the agent changed in any of them; absent "
            "if there is none",
        ),
        Metric(
            "group/zero_std",
            "share of groups",
            "groups whose rewards are all equal; such groups give no gradient if rewards are "
            "compared within the group. A group of one trajectory counts only then",
            ("groups_zero_std",),
        ),
        Metric(
            "rollout/length_mean",
            "tokens",
            "mean number of sampled tokens in a trajectory",
            ("response_tokens",),
        ),
        Metric(
            "rollout/length_max",
            "tokens",
            "number of sampled tokens in the longest trajectory",
            ("response_tokens_max",),
        ),
        Metric(
            "rollout/truncated",
            "share of trajectories",
            "trajectories cut off by `gconfig.max_new_tokens` or by the model's context length",
            ("truncated",),
        ),
        Metric(
            "staleness/mean",
            "versions",
            "mean staleness of the groups: the policy's version minus the oldest version that "
            "sampled a token of the group",
            ("staleness_mean",),
        ),
        Metric("staleness/max", "versions", "largest staleness of a group", ("staleness_max",)),
        Metric("replay", "", "true if a resumed run trained on this batch again"),
        Metric(
            "queued",
            "groups",
            "finished groups that waited in the ledger when this batch was taken",
        ),
    ),
    "Loss": (
        Metric("train/loss", "", "the loss that the optimizer minimizes", ("loss",)),
        Metric(
            "train/advantage_abs",
            "",
            "mean absolute value of the advantages, after normalization",
            ("advantage_abs",),
        ),
        Metric(
            "train/accuracy",
            "share of pairs",
            "DPO and reward models: pairs whose chosen answer has the higher score",
            ("accuracy",),
        ),
        Metric(
            "train/margin",
            "",
            "DPO and reward models: mean score of chosen minus rejected answers",
            ("margin",),
        ),
        Metric(
            "policy/ppo_ratio",
            "",
            "mean ratio of the policy to the proximal policy",
            ("ppo_ratio",),
        ),
        Metric(
            "policy/clip_ratio",
            "share of tokens",
            "tokens whose ratio was clipped",
            ("clip_ratio",),
        ),
        Metric(
            "policy/dual_clip_ratio",
            "share of tokens",
            "tokens clipped by the dual clip",
            ("dual_clip_ratio",),
        ),
        Metric(
            "policy/kl",
            "nats",
            "KL divergence of the proximal policy from the policy, estimated with k3",
            ("approx_kl",),
        ),
        Metric("policy/entropy", "nats", "entropy of the policy, mean over tokens", ("entropy",)),
        Metric(
            "policy/behavior_weight",
            "",
            "mean of exp(proximal - behavior) over the tokens that are kept in the loss",
            ("behavior_weight",),
        ),
        Metric(
            "policy/behavior_weight_max",
            "",
            "largest behavior weight of a token",
            ("behavior_weight_max",),
        ),
        Metric(
            "policy/behavior_weight_capped",
            "share of tokens",
            "tokens whose behavior weight was masked or truncated",
            ("behavior_weight_capped_ratio",),
        ),
        Metric(
            "reference/kl",
            "nats",
            "KL divergence from the reference model, as used in the loss; only with "
            "`actor.kl_loss_ctl`",
            ("kl",),
        ),
        Metric(
            "mismatch/kl",
            "nats",
            "KL divergence between the servers' and the trainer's logprobs for the same version "
            "([runbook](runbooks/logprob-mismatch.md))",
        ),
        Metric(
            "mismatch/max",
            "nats",
            "largest absolute difference between a server's and the trainer's logprob of a token",
        ),
        Metric(
            "routes/replayed",
            "share of tokens",
            "tokens, prompts included, that the policy computed with the experts that the server "
            "chose ([router replay](router-replay.md)); only for a mixture of experts",
            ("routed_ratio",),
        ),
        Metric(
            "routes/missing",
            "trajectories",
            "trajectories of which no token was; only for a mixture of experts",
            ("unrouted_sequences",),
        ),
        Metric("critic/loss", "", "loss of the critic"),
        Metric("critic/value", "", "mean value that the critic predicts"),
        Metric("critic/return", "", "mean return that the critic learns to predict"),
        Metric(
            "critic/explained_variance",
            "",
            "share of the returns' variance that the values explain; at most 1",
        ),
        Metric("critic/clip_ratio", "share of tokens", "tokens whose value was clipped"),
        Metric(
            "critic/warmup",
            "",
            "1 in the first `critic.warmup_steps` steps, which train only the critic; then 0",
        ),
    ),
    "Optimizer": (
        Metric(
            "train/grad_norm",
            "",
            "mean gradient norm of the minibatches, before clipping",
            ("grad_norm",),
        ),
        Metric("train/lr", "", "learning rate of the last minibatch", ("lr",)),
        Metric("critic/grad_norm", "", "the critic's gradient norm before clipping"),
        Metric("critic/lr", "", "the critic's learning rate"),
        Metric(
            "train/skipped_steps",
            "steps",
            "optimizer steps skipped because a gradient was not finite",
            ("skipped_steps",),
        ),
        Metric(
            "train/micro_batches",
            "",
            "number of micro-batches of a rank, each with a forward and a backward pass",
            ("n_micro_batches",),
        ),
        Metric(
            "train/tokens",
            "tokens",
            "tokens that the engine computed, including prompts, summed over minibatches",
            ("n_tokens",),
        ),
        Metric(
            "train/loss_tokens",
            "",
            "number of items in the loss: sampled tokens, or pairs for DPO and reward models",
            ("n_loss_tokens", "tokens"),
        ),
        Metric(
            "train/tokens_per_second",
            "tokens/s",
            "`train/tokens` divided by `time/engine`",
            ("tokens_per_second",),
        ),
        Metric(
            "train/mfu",
            "",
            "model FLOPs utilization: the share of the GPUs' peak speed that the model's "
            "operations reach; only on known GPUs",
            ("mfu",),
        ),
        Metric(
            "train/peak_gib", "GiB", "peak memory of the rank that uses the most", ("peak_gib",)
        ),
    ),
    "Time": (
        _time("step", "the whole step, from the request for the batch"),
        _time("wait", "waiting for the batch"),
        _time("train", "the update of the policy and the computation of its metrics"),
        _time("update", "the update of the policy, over all minibatches"),
        _time(
            "engine",
            "the forward and backward passes and the optimizer, within the update",
            "seconds",
        ),
        _time("forward", "forward passes on the slowest rank"),
        _time("backward", "backward passes on the slowest rank"),
        _time("optimizer", "gradient clipping and the optimizer on the slowest rank"),
        _time("critic", "the update of the critic", "critic/seconds"),
        _time("confirm", "waiting for a server to confirm the previous version"),
        _time("publish", "waiting for the export of the new version's weights"),
        _time("checkpoint", "copying the state, in a step that saves a checkpoint"),
    ),
    "Evaluations": (
        Metric("eval/NAME/mean", "", "mean reward in an evaluation, over rows"),
        Metric("eval/NAME/stderr", "", "standard error of `eval/NAME/mean`, over rows"),
        Metric("eval/NAME/failed", "rows", "rows without a result, which the mean leaves out"),
    ),
}
"""Metrics by section of docs/metrics.md. Only trackers get the last section: metrics.jsonl has
steps."""

NAMES: dict[str, str] = {
    statistic: metric.name
    for section in METRICS.values()
    for metric in section
    for statistic in metric.statistics
}
"""Statistic of an engine, or key of an earlier release's row -> metric. All other keys are kept."""


def named(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a row, or the statistics of an update, under the names of metrics."""
    return {NAMES.get(key, key): value for key, value in row.items()}


def evaluation_names(
    name: str, mean: float, stderr: float, failed: float = 0.0
) -> dict[str, float]:
    """Returns the metrics of one evaluation, as trackers have them."""
    figures = {"mean": mean, "stderr": stderr, "failed": failed}
    return {f"eval/{name}/{figure}": value for figure, value in figures.items()}


def refuse_taken(name: object, who: str) -> None:
    """Raises InvalidInput for a number that cannot be in a step's row under this name."""
    if not isinstance(name, str) or not name:
        raise InvalidInput(f"{who}: name {name!r}: expected a name, such as 'my/number'")
    if not name.isprintable():  # nor a lone surrogate, which no file can hold
        raise InvalidInput(f"{who}: name {name!r}: expected printable characters")
    taken = {metric.name for section in METRICS.values() for metric in section}
    if name in taken | set(NAMES):
        raise InvalidInput(
            f"{who}: {name!r} is a metric of every step: expected another name, such as 'my/{name}'"
        )


def plain_numbers(numbers: object, who: str) -> dict[str, float]:
    """Returns a recipe's own numbers for a step's row.

    Args:
        numbers: Name to number, or to a tensor or array of one number.
        who: For messages: the place that records them.

    Raises:
        InvalidInput: A name is that of a metric of every step, or a value is no single number.
    """
    if not isinstance(numbers, Mapping):
        raise InvalidInput(
            f"{who}: {type(numbers).__name__}: expected a dict such as {{'my/number': 1.0}}"
        )
    found: dict[str, float] = {}
    for name, value in numbers.items():
        refuse_taken(name, who)
        single = value
        if hasattr(value, "item") and getattr(value, "size", None) is not None:
            count = value.numel() if hasattr(value, "numel") else value.size
            single = value.item() if count == 1 else value
        if not isinstance(single, int | float):
            shape = getattr(value, "shape", None)
            got = type(value).__name__ if shape is None else f"shape {tuple(shape)}"
            raise InvalidInput(f"{who}: {name!r}: expected a number, got {got}")
        if isinstance(single, int) and not -(2**63) <= single < 2**63:
            bits = single.bit_length()
            raise InvalidInput(f"{who}: {name!r}: expected a number of 64 bits, got one of {bits}")
        found[name] = single
    return found
