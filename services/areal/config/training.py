"""Configuration of training: optimizer, micro-batches, normalization, engine and PPO.

Plain dataclasses that OmegaConf can read as structured configs. This module imports no torch, so
that any process can load and check a trainer's configuration.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

from areal.errors import ConfigError


def _require(condition: bool, name: str, value: Any, expected: str) -> None:
    if not condition:
        raise ConfigError(f"{name}={value!r}: expected {expected}")


def _require_one_of(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    _require(value in choices, name, value, "one of " + ", ".join(repr(c) for c in choices))


@dataclass
class OptimizerConfig:
    """AdamW, its learning-rate schedule and gradient clipping."""

    lr: float = 1.7e-5
    """Peak learning rate."""
    weight_decay: float = 0.017
    """Decoupled weight decay; applied to tensors of two or more dimensions only (not to biases or
    norms)."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.999
    """Decay of the second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    lr_scheduler_type: str = "constant"
    """After warm-up: `constant`, `linear` or `cosine` down to `min_lr_ratio`."""
    min_lr_ratio: float = 0.0
    """Final learning rate over `lr`, for `linear` and `cosine`."""
    warmup_steps_proportion: float = 0.001
    """Fraction of all optimizer steps spent in a linear warm-up (0 steps when their number is
    unknown)."""
    gradient_clipping: float = 1.0
    """Largest global gradient norm; 0 switches clipping off."""
    max_skipped_steps: int = 3
    """A step whose gradient is not finite is skipped; this many in a row end the run."""

    def __post_init__(self) -> None:
        _require(self.lr >= 0, "optimizer.lr", self.lr, "a number >= 0")
        _require(0 <= self.beta1 < 1, "optimizer.beta1", self.beta1, "a number in [0, 1)")
        _require(0 <= self.beta2 < 1, "optimizer.beta2", self.beta2, "a number in [0, 1)")
        _require(self.eps > 0, "optimizer.eps", self.eps, "a number > 0")
        _require_one_of(
            "optimizer.lr_scheduler_type", self.lr_scheduler_type, ("constant", "linear", "cosine")
        )
        _require(
            0 <= self.warmup_steps_proportion <= 1,
            "optimizer.warmup_steps_proportion",
            self.warmup_steps_proportion,
            "a number in [0, 1]",
        )
        _require(
            self.gradient_clipping >= 0,
            "optimizer.gradient_clipping",
            self.gradient_clipping,
            "a number >= 0",
        )
        _require(
            self.max_skipped_steps > 0,
            "optimizer.max_skipped_steps",
            self.max_skipped_steps,
            "an integer > 0",
        )

    def learning_rate(self, step: int, total_steps: int | None) -> float:
        """Return the learning rate of optimizer step `step` (0 is the first).

        Warm-up takes the fraction's whole steps, rounded down, and rises in equal parts from
        lr / (steps + 1): no step is spent at a rate of 0, with which transformers' begins.

        Args:
            step: finished optimizer steps.
            total_steps: planned optimizer steps; None keeps the rate constant without warm-up.
        """
        if total_steps is None:
            return self.lr
        warmup = int(self.warmup_steps_proportion * total_steps)
        if step < warmup:
            return self.lr * (step + 1) / (warmup + 1)
        if self.lr_scheduler_type == "constant":
            return self.lr
        progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
        if self.lr_scheduler_type == "linear":
            falling = 1.0 - progress
        else:
            falling = 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.lr * (self.min_lr_ratio + (1.0 - self.min_lr_ratio) * falling)


@dataclass
class MicroBatchSpec:
    """How a batch is cut into micro-batches whose gradients are accumulated."""

    max_tokens_per_mb: int = 10240
    """Token budget of a micro-batch; a longer single sequence forms a micro-batch of its own."""
    n_mbs: int = 1
    """Smallest number of micro-batches."""

    def __post_init__(self) -> None:
        _require(
            self.max_tokens_per_mb > 0,
            "mb_spec.max_tokens_per_mb",
            self.max_tokens_per_mb,
            "an integer > 0",
        )
        _require(self.n_mbs > 0, "mb_spec.n_mbs", self.n_mbs, "an integer > 0")


@dataclass
class NormConfig:
    """Which mean is subtracted and which standard deviation divides.

    Example:
        GRPO rewards: `NormConfig(mean_level="group", std_level="group")`;
        RLOO: `NormConfig(mean_level="group", mean_leave1out=True, std_level=None)`;
        Dr. GRPO: `NormConfig(mean_level="group", std_level=None)`;
        REINFORCE++ advantages: `NormConfig()` (batch, batch).
    """

    mean_level: str | None = "batch"
    """`batch`, `group` or null."""
    std_level: str | None = "batch"
    """`batch`, `group` or null; a group of one or of equal rewards counts as std 1."""
    mean_leave1out: bool = False
    """The mean leaves the sample itself out (group level; a group of one then gets 0)."""
    std_unbiased: bool = True
    """Divide squares by n - 1 instead of n."""
    eps: float = 1e-5
    """Added to the standard deviation."""

    def __post_init__(self) -> None:
        _require_one_of("mean_level", self.mean_level, ("batch", "group", None))
        _require_one_of("std_level", self.std_level, ("batch", "group", None))
        _require(
            not (self.mean_leave1out and self.mean_level != "group"),
            "mean_leave1out",
            self.mean_leave1out,
            "false unless mean_level is 'group'",
        )
        _require(self.eps > 0, "eps", self.eps, "a number > 0")


@dataclass
class EngineConfig:
    """A model on the trainer's ranks, trained or frozen: its source, precision, micro-batches."""

    path: str = ""
    """Hugging Face model directory; empty: `model.path`."""
    init_from_scratch: bool = False
    """Use the directory's config only, with freshly initialized weights."""
    dtype: str = "auto"
    """Compute precision: `float32`, `bfloat16`, `float64`, or `auto` (bfloat16 on GPU, float32 on
    CPU)."""
    attn_impl: str = "auto"
    """`packed` (bucketed SDPA, any device, shares prefixes), `flash_attention_2`, or `auto`."""
    share_prefixes: bool = True
    """Compute the common prefix of a group's sequences once (exact; `packed` attention only)."""
    logits_chunk_elements: int = 1 << 26
    """Largest logits tensor (tokens x vocabulary) that is materialized at once."""
    fsdp_at_world_size_1: bool = False
    """Wrap with fully_shard although there is nothing to shard."""
    mb_spec: MicroBatchSpec = field(default_factory=MicroBatchSpec)
    """Micro-batches."""
    seed: int = 1
    """Seed of weight initialization."""
    distributed_timeout_seconds: float = 600.0
    """Deadline of every collective."""

    def __post_init__(self) -> None:
        _require_one_of("dtype", self.dtype, ("auto", "float32", "bfloat16", "float64"))
        _require_one_of("attn_impl", self.attn_impl, ("auto", "packed", "flash_attention_2"))
        _require(
            self.logits_chunk_elements > 0,
            "logits_chunk_elements",
            self.logits_chunk_elements,
            "an integer > 0",
        )
        _require(
            self.distributed_timeout_seconds > 0,
            "distributed_timeout_seconds",
            self.distributed_timeout_seconds,
            "a number > 0",
        )


@dataclass
class TrainEngineConfig(EngineConfig):
    """A model under training."""

    master_dtype: str = "float32"
    """Precision of the weights that the optimizer updates: `float32` or `float64`; never below
    `dtype`."""
    gradient_checkpointing: bool | None = None
    """Recompute each decoder layer in the backward pass, so that activations of one layer at a time
    are kept; null: on a GPU."""
    optimizer: OptimizerConfig | None = field(default_factory=OptimizerConfig)
    """Optimizer; null for a model that is not trained."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(
            self.master_dtype in ("float32", "float64"),
            "master_dtype",
            self.master_dtype,
            "float32 or float64: 16 bits round most updates to nothing (dtype is what computes)",
        )


@dataclass
class RefConfig(EngineConfig):
    """A frozen model, such as the reference of the KL term.

    It has no optimizer, no master weights (they lie in the compute precision), and no place in a
    checkpoint: a resumed run loads it from `path` again.
    """

    offload: bool = False
    """Keep the weights in host memory; each layer is copied to the GPU while it computes."""
    optimizer: ClassVar[None] = None


@dataclass
class PPOActorConfig(TrainEngineConfig):
    """Decoupled PPO (GRPO, RLOO, Dr. GRPO, REINFORCE++, GSPO and CISPO are settings of it)."""

    ppo_n_minibatches: int = 1
    """Optimizer steps a batch is cut into."""
    loss_type: str = "ppo"
    """`ppo` (clipped ratio) or `cispo` (clipped, detached ratio as weight)."""
    importance_sampling_level: str = "token"
    """`token`, or `sequence` (GSPO: one ratio per sequence)."""
    eps_clip: float = 0.2
    """The ratio is clipped at 1 - eps_clip."""
    eps_clip_higher: float | None = None
    """The ratio is clipped at 1 + eps_clip_higher (null: eps_clip)."""
    c_clip: float | None = None
    """Dual clip: bound of the loss for negative advantages, in |advantage|; > 1."""
    use_decoupled_loss: bool = True
    """Clip around the proximal policy, and weight with exp(proximal - behavior) for what has
    changed since sampling. `false`: no weight; what is clipped around is `recompute_logprob`'s
    choice."""
    behavior_weight_cap: float | None = 5.0
    """Tokens with a larger behavior weight are left out of the loss (null: none is)."""
    recompute_logprob: bool = True
    """What the ratio is clipped around: the policy at the start of the update (`true`: its logprobs
    are computed again), or the sampler (`false`; only with `use_decoupled_loss=false`: plain PPO
    on the sampler's logprobs). As in AReaL."""
    prox_logp_method: str = "recompute"
    """Logprobs at the start of the update: `recompute`, or `loglinear` (interpolated by token
    version, no extra forward; only with `use_decoupled_loss=true`)."""
    temperature: float | None = None
    """Temperature of the logprobs that are compared; null: `gconfig.temperature`, the sampler's.
    Another one than the sampler's is refused."""
    reward_bias: float = 0.0
    """Added to each sequence's reward, before scaling."""
    reward_scaling: float = 1.0
    """Factor of each sequence's reward."""
    reward_clip: float = 20.0
    """Bound of a sequence's absolute reward after bias and scaling."""
    overlong_reward_penalty: bool = False
    """Subtract a penalty that grows linearly over the last `overlong_tokens` of
    `max_response_tokens`."""
    overlong_tokens: int = 0
    """Length of the penalized range."""
    overlong_penalty_factor: float = 1.0
    """Penalty at `max_response_tokens` and beyond (DAPO)."""
    max_response_tokens: int = 0
    """Response length at which the overlong penalty is full."""
    mask_no_eos_with_zero: bool = False
    """The reward of a sequence cut off without end-of-sequence counts 0 (batch key `truncated`)."""
    reward_norm: NormConfig | None = None
    """Normalization of sequence rewards; rewards before the last token are scaled alike."""
    kl_ctl: float = 0.0
    """Weight of the KL penalty of the policy at the start of the update against
    `reference_logprobs`, in the token rewards."""
    kl_estimator: str = "k1"
    """`k1`, `k2` or `k3`."""
    discount: float = 1.0
    """GAE's gamma."""
    gae_lambda: float = 1.0
    """GAE's lambda."""
    adv_norm: NormConfig | None = field(default_factory=NormConfig)
    """Normalization of token advantages (level `batch` or null)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(
            self.ppo_n_minibatches > 0,
            "ppo_n_minibatches",
            self.ppo_n_minibatches,
            "an integer > 0",
        )
        _require_one_of("loss_type", self.loss_type, ("ppo", "cispo"))
        _require_one_of(
            "importance_sampling_level", self.importance_sampling_level, ("token", "sequence")
        )
        _require(
            not (self.loss_type == "cispo" and self.importance_sampling_level == "sequence"),
            "importance_sampling_level",
            self.importance_sampling_level,
            "'token' with loss_type 'cispo'",
        )
        _require(0 < self.eps_clip < 1, "eps_clip", self.eps_clip, "a number in (0, 1)")
        _require(
            self.c_clip is None or self.c_clip > 1, "c_clip", self.c_clip, "null or a number > 1"
        )
        _require(
            self.behavior_weight_cap is None or self.behavior_weight_cap > 0,
            "behavior_weight_cap",
            self.behavior_weight_cap,
            "null or a number > 0",
        )
        _require_one_of("prox_logp_method", self.prox_logp_method, ("recompute", "loglinear"))
        _require(
            self.recompute_logprob or not self.use_decoupled_loss,
            "recompute_logprob",
            self.recompute_logprob,
            "true with use_decoupled_loss=true, whose weight is made of the recomputed logprobs "
            "(plain PPO around the sampler: use_decoupled_loss=false too)",
        )
        _require(
            self.use_decoupled_loss or self.prox_logp_method == "recompute",
            "prox_logp_method",
            self.prox_logp_method,
            "'recompute' with use_decoupled_loss=false",
        )
        _require_one_of("kl_estimator", self.kl_estimator, ("k1", "k2", "k3"))
        _require(
            self.temperature is None or self.temperature > 0,
            "temperature",
            self.temperature,
            "null or a number > 0",
        )
        _require(0 <= self.discount <= 1, "discount", self.discount, "a number in [0, 1]")
        _require(0 <= self.gae_lambda <= 1, "gae_lambda", self.gae_lambda, "a number in [0, 1]")
        _require(self.reward_clip > 0, "reward_clip", self.reward_clip, "a number > 0")
        if self.adv_norm is not None:
            _require(
                "group" not in (self.adv_norm.mean_level, self.adv_norm.std_level),
                "adv_norm",
                self.adv_norm,
                "levels 'batch' or null (normalize groups with reward_norm)",
            )
        if self.overlong_reward_penalty:
            _require(
                0 < self.overlong_tokens <= self.max_response_tokens,
                "overlong_tokens",
                self.overlong_tokens,
                f"an integer in [1, max_response_tokens={self.max_response_tokens}]",
            )
