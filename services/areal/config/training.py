"""Configuration of a trainer: model, precision, micro-batches, optimizer, algorithm.

Plain dataclasses with types that OmegaConf can represent, so that a section of an experiment file
can be merged into them; limits are annotations that `areal.config.checks` reads. Importing this
module does not import torch: launchers check a trainer's configuration.

Fields that are `_NOT_A_KEY` have a default that is right for every run: code may set them, an
experiment file may not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Gt, Le, Lt

from areal.config.losses import LossType
from areal.errors import ConfigError

# OmegaConf neither reads nor writes such a field.
_NOT_A_KEY = {"omegaconf_ignore": True}

Dtype = Literal["auto", "float32", "bfloat16", "float64"]
Checkpointing = Literal["none", "selective", "full", "offload"]
AdapterForm = Literal["auto", "adapter", "merged"]
Moments = Literal["float32", "bfloat16"]
OptimizerType = Literal["adamw", "muon"]
Kernels = Literal["auto", "eager", "compile", "liger"]
Attention = Literal[
    "auto",
    "packed",
    "varlen",
    "varlen_repeat_kv",
    "varlen_cudnn",
    "flash_attention_2",
    "flash_attention_3",
]
RewardNorm = Literal[
    "group/group", "group/batch", "group/none",
    "leave1out/group", "leave1out/batch", "leave1out/none",
    "batch/group", "batch/batch", "batch/none",
    "none/group", "none/batch",
]  # fmt: skip
BehaviorWeightMode = Literal[
    "token_mask", "token_truncate", "sequence_mask", "sequence_truncate", "second_moment"
]
AdvantageNorm = Literal["batch/batch", "batch/none", "none/batch"]


@dataclass
class OptimizerConfig:
    """The optimizer, its learning-rate schedule and gradient clipping."""

    type: OptimizerType = "adamw"
    """`muon`: the matrices of the layers are updated by Muon, which keeps one float32 moment of
    them instead of two; embeddings, head, norms and biases by AdamW. Rates and weight decay mean
    the same as for `adamw`, but try higher rates: the demo learns well at 1e-3, at which it
    collapses with AdamW (docs/learning.md)."""

    lr: Annotated[float, Ge(0)] = 1.7e-5
    """Peak learning rate."""
    weight_decay: Annotated[float, Ge(0)] = 0.017
    """Decoupled weight decay, applied only to tensors of two or more dimensions (not to biases or
    norms)."""
    beta1: Annotated[float, Ge(0), Lt(1)] = field(default=0.9, metadata=_NOT_A_KEY)
    """Decay of the first moment."""
    beta2: Annotated[float, Ge(0), Lt(1)] = 0.999
    """Decay of the second moment."""
    eps: Annotated[float, Gt(0)] = field(default=1e-8, metadata=_NOT_A_KEY)
    """Added to the root of the second moment."""
    moments: Moments = "float32"
    """Precision in which AdamW keeps its two moments. `bfloat16` takes 12 bytes per trained
    parameter instead of 16, for a GPU with little memory. Moments are then rounded at random, so
    that their mean is that of float32; a step takes a little longer."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up: `constant`, or a `linear` or `cosine` decay to
    `lr * min_lr_ratio`."""
    min_lr_ratio: Annotated[float, Ge(0), Le(1)] = 0.0
    """Final learning rate as a fraction of `lr`, for `linear` and `cosine`."""
    warmup_steps_proportion: Annotated[float, Ge(0), Le(1)] = 0.05
    """Fraction of all optimizer steps that are used for a linear warm-up; there is no warm-up if
    the number of steps is unknown. Without a warm-up, asynchronous training gets worse at first:
    Adam's first updates have full size, and the first few updates all train on samples of the same
    policy version."""
    gradient_clipping: Annotated[float, Ge(0)] = 1.0
    """Gradients are scaled down to this global norm if their norm is larger; 0 turns this off."""
    max_skipped_steps: Annotated[int, Gt(0)] = field(default=3, metadata=_NOT_A_KEY)
    """A step whose gradient is not finite is skipped; this many in a row end the run. One or two
    can be an unlucky batch; a policy that is NaN never recovers."""

    def learning_rate(self, step: int, total_steps: int | None) -> float:
        """Returns the learning rate of optimizer step `step` (0 is the first).

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

    max_tokens_per_mb: Annotated[int, Gt(0)] = 10240
    """Token budget of a micro-batch. A longer sequence is a micro-batch on its own."""
    n_mbs: Annotated[int, Gt(0)] = field(default=1, metadata=_NOT_A_KEY)
    """Minimum number of micro-batches."""


@dataclass
class EngineConfig:
    """A model on the trainer's ranks, trained or frozen: its source, precision, micro-batches."""

    path: str = field(default="", metadata=_NOT_A_KEY)
    """Hugging Face model directory; empty: `model.path`."""
    init_from_scratch: bool = field(default=False, metadata=_NOT_A_KEY)
    """Use the directory's config only, with freshly initialized weights."""
    seed: int = field(default=1, metadata=_NOT_A_KEY)
    """Seed of weight initialization."""
    dtype: Dtype = field(default="auto", metadata=_NOT_A_KEY)
    """Compute precision: `float32`, `bfloat16`, `float64`, or `auto` (bfloat16 on GPU, float32 on
    CPU)."""
    attn_impl: Attention = field(default="auto", metadata=_NOT_A_KEY)
    """The attention kernel."""
    share_prefixes: bool | None = field(default=None, metadata=_NOT_A_KEY)
    """Compute the common prefix of a group's sequences once (exact); null: with the attention
    kernels of a GPU, which then copy queries, keys and values, only in micro-batches where a fifth
    of the tokens need not be computed."""
    logits_chunk_elements: Annotated[int | None, Gt(0)] = field(default=None, metadata=_NOT_A_KEY)
    """Maximum size of a logits tensor (tokens x vocabulary) that is materialized at once. null: on
    a GPU, that of 4,096 tokens or, where memory is short, of fewer; on a CPU 256 MiB in float32,
    because larger tensors are not faster there."""
    fsdp_at_world_size_1: bool = field(default=False, metadata=_NOT_A_KEY)
    """Wrap with fully_shard although there is nothing to shard."""
    distributed_timeout_seconds: Annotated[float, Gt(0)] = field(default=600.0, metadata=_NOT_A_KEY)
    """Deadline of every collective: 5 times `rollout.setup_timeout_s`, because rank 0 publishes
    while the other ranks wait in a collective. Where that is null: 600 s, or 1800 s on GPUs."""
    mb_spec: MicroBatchSpec = field(default_factory=MicroBatchSpec, metadata=_NOT_A_KEY)
    """Micro-batches."""
    scalar: bool = field(default=False, metadata=_NOT_A_KEY)
    """The model outputs one number per token instead of a distribution, as a critic or a reward
    model does. Its head starts at 0 unless `path` has one."""
    kernels: Kernels = field(default="eager", metadata=_NOT_A_KEY)
    """What computes a layer's norms, rotary embeddings and MLP activations."""
    offload: bool = False
    """Keep the weights in host memory; each layer is copied to the GPU while it computes. For a
    model that is trained, the gradients and the optimizer state are in host memory, too, and the
    optimizer runs on the CPU."""
    layout: str = field(default="", metadata=_NOT_A_KEY)
    """How ranks share model and batch, as in `allocation_mode` (`d8t2`). Empty: each rank has a
    share of the batch and of the weights."""


@dataclass
class LoraConfig:
    """Adapters of rank `rank` for linear layers, trained instead of the model (LoRA)."""

    rank: Annotated[int, Gt(0)] = 16
    """Rank of the product B A that is added to a layer's weight. A higher rank can learn more, but
    takes more memory."""
    alpha: Annotated[int, Gt(0)] = 32
    """The product B A is multiplied by alpha / rank."""
    targets: list[str] = field(default_factory=list)
    """Which linear layers of the language decoder get adapters, by the last part of their names,
    such as q_proj; an empty list means all of them."""
    publish: AdapterForm = "auto"
    """What inference servers get. `adapter`: only the adapters, which the servers add to the model.
    `merged`: the whole model, with the adapters merged into it. `auto` means `adapter` if `areal
    run` starts the servers and they can add adapters to this model; otherwise `merged`. The log's
    line `lora_published` says which, and why."""


@dataclass
class TrainEngineConfig(EngineConfig):
    """The settings of a model under training."""

    dtype: Dtype = "auto"
    """Compute precision: `float32`, `bfloat16`, `float64`, or `auto` (bfloat16 on GPU, float32 on
    CPU). The weights that the optimizer updates have 32 bits or more, because 16 bits would round
    most updates to zero."""
    mb_spec: MicroBatchSpec = field(default_factory=MicroBatchSpec)
    """How a batch is split into micro-batches, whose gradients are added up."""
    gradient_checkpointing: bool | Checkpointing | None = None
    """What the backward pass recomputes instead of keeping it in memory. `none` or false: nothing.
    `selective`: everything except matrix products and attention (compared with `none`, less than
    half the memory at nearly the same speed). `full` or true: each layer from its input (a third
    more operations than `none`). `offload`: the same as `full`, but the inputs are in host memory.
    null means `none` on a CPU. On a GPU, null means the first of these modes that fits according to
    the estimate of `areal doctor`, or `full` if there is no estimate."""
    kernels: Kernels = "auto"
    """How a layer's norms and MLP activations are computed: `eager` (one operation after another),
    `compile` (torch.compile for each layer, its rotary embedding too; the first steps take longer)
    or `liger` (the package liger-kernel; needs a GPU). `auto` means `liger` for a llama, qwen2 or
    qwen3 model on a GPU, if the package is installed and matrices are not spread over ranks (t);
    otherwise `eager`, and the log's line `memory_estimate` names it. On an H200 `liger` trained 1.2
    times as fast (docs/gpu.md)."""
    attn_impl: Attention = "auto"
    """The attention kernel, also of the reference and the critic. `flash_attention_3` and
    `flash_attention_2` need their packages; `varlen` is torch's flash attention, and
    `varlen_cudnn` the same, but cuDNN's attention for sequences of 16,384 tokens and more (Hopper
    or later; no sliding windows); `varlen_repeat_kv` copies keys and values to each head; `packed`
    is bucketed SDPA, for any device and model. `auto` takes the first that computes a few tokens
    correctly, forward and backward, on the run's own device: the packages, `varlen_cudnn`,
    `varlen`, `varlen_repeat_kv`, `packed`. A log line gives the reason for each that does not. A
    kernel that is named and does not work ends the run. On a CPU there is only `packed`."""
    optimizer: OptimizerConfig | None = field(default_factory=OptimizerConfig)
    """The optimizer and its learning-rate schedule; null for a model that is not trained."""
    largest_micro_batch: int = field(default=0, metadata=_NOT_A_KEY)
    """Tokens for which memory is estimated: a sequence longer than the budget forms a micro-batch
    of its own. 0: the budget."""
    reference: RefConfig | None = field(default=None, metadata=_NOT_A_KEY)
    """The frozen model on the same ranks, for the same estimate: the experiment's `ref`."""
    lora: LoraConfig | None = None
    """Train adapters instead of the whole model, with about ten times the learning rate.
    `actor.lora={}` uses the defaults; null trains the whole model. With an empty `ref.path`, the
    reference is the actor without its adapters."""

    def check_optimizer(self) -> None:
        """Raises ConfigError if the optimizer cannot be had with the other settings."""
        if self.optimizer is None or self.optimizer.type != "muon":
            return
        for wrong, key, expected in (
            (self.lora is not None, "lora", "null, because adapters have few directions"),
            (self.offload, "offload", "false, because whole matrices are gathered on the GPU"),
            (self.optimizer.moments != "float32", "optimizer.moments", "float32"),
        ):
            if wrong:
                raise ConfigError(f"actor.{key}: expected {expected}, with optimizer.type muon")


@dataclass
class RefConfig(EngineConfig):
    """A frozen model, such as the reference of the KL term, which computes as the actor does.

    It has no optimizer and no master weights (its weights have the compute precision), and
    checkpoints do not contain it: a resumed run loads it from `path` again.
    """

    path: str = ""
    """Hugging Face model directory; empty means `model.path`."""
    optimizer: ClassVar[None] = None
    lora: ClassVar[None] = None


@dataclass
class PPOActorConfig(TrainEngineConfig):
    """Decoupled PPO. `algorithm` sets keys for GRPO, RLOO and others; you can override each key."""

    ppo_n_minibatches: Annotated[int, Gt(0)] = 1
    """Number of minibatches per batch, with one optimizer step for each."""
    loss_type: LossType = "ppo"
    """How the loss uses the probability ratio of the policy to the proximal policy. `ppo` clips the
    ratio of each token, `gspo` that of each sequence. `cispo` uses the clipped ratio as a weight
    without gradient. `sapo` uses a soft gate on the ratio instead of a clip. A recipe can bring a
    loss of its own instead: `FSDPPPOActor(config.actor, loss=my_loss)`."""
    loss_constants: dict[str, float] = field(default_factory=dict)
    """Constants that only this loss has, such as `actor.loss_constants={tau_negative: 1.1}` with
    `loss_type=sapo`; see docs/algorithms.md."""
    loss_aggregation: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    """How the losses of tokens are averaged over the minibatch of all ranks. `token_mean`: the mean
    over tokens. `sequence_mean`: the mean over sequences, where a sequence's loss is the mean over
    its tokens. `constant`: the mean over sequences, where a sequence's loss is the sum over its
    tokens divided by `gconfig.max_new_tokens`. With `constant`, a token's weight does not depend on
    the sequence's length (Dr. GRPO)."""
    eps_clip: Annotated[float, Gt(0), Le(1)] = 0.2
    """The ratio is clipped from below at 1 - eps_clip; 1 turns this off."""
    eps_clip_higher: Annotated[float | None, Gt(0)] = None
    """The ratio is clipped from above at 1 + eps_clip_higher; null uses the value of `eps_clip`."""
    c_clip: Annotated[float | None, Gt(1)] = None
    """Dual clip: for a negative advantage, the loss is at most c_clip * |advantage|. Must be above
    1; null turns it off."""
    prox_logp_method: Literal["recompute", "loglinear", "unweighted", "behavior"] = "recompute"
    """The policy that the ratio is relative to, and whether tokens are weighted. `recompute`: the
    policy at the start of the update (proximal policy). Each token has a weight, exp(proximal
    logprob - behavior logprob), which corrects for the policy's change since the token was sampled
    (decoupled PPO). `loglinear`: the same, but proximal logprobs are interpolated by token version
    instead of computed in an extra forward pass. `unweighted`: the policy at the start of the
    update, without weights. `behavior`: the policy that sampled the token, without weights (plain
    PPO)."""
    behavior_weight_cap: Annotated[float | None, Gt(0)] = 5.0
    """Cap on the weight exp(proximal - behavior); `behavior_weight_mode` says what happens to a
    larger weight. null removes the cap."""
    behavior_weight_mode: BehaviorWeightMode = "token_truncate"
    """What happens to a weight above the cap. `token_truncate`: the token gets the cap as its
    weight. `token_mask`: the token is left out of the loss. `sequence_truncate`, `sequence_mask`:
    the same, but all tokens of a sequence have one weight, the product of their weights.
    `second_moment`: tokens are left out, starting with those whose probability changed most, until
    the mean squared log weight of the rest is below the cap (M2PO). This mode takes an extra
    forward pass, and one more for each of several minibatches. AReaL's default is `token_mask`.
    Ours is not, because a wrong token above the cap has just become likely, and leaving it out
    removes the gradient that would make it unlikely again."""
    reward_bias: float = field(default=0.0, metadata=_NOT_A_KEY)
    """Added to each sequence's reward, before scaling."""
    reward_scaling: float = 1.0
    """Factor by which each sequence's reward is multiplied."""
    reward_clip: Annotated[float, Gt(0)] = 20.0
    """After scaling, a sequence's reward is clipped to [-reward_clip, reward_clip]."""
    overlong_tokens: Annotated[int, Ge(0)] = 0
    """A penalty on long sequences is subtracted from the reward (DAPO). It starts this many tokens
    before `gconfig.max_new_tokens` and grows linearly from 0 to 1. 0 turns the penalty off."""
    overlong_penalty_factor: float = field(default=1.0, metadata=_NOT_A_KEY)
    """Penalty at `max_response_tokens` and beyond."""
    max_response_tokens: int = field(default=0, metadata=_NOT_A_KEY)
    """Response length at which the overlong penalty is full: `gconfig.max_new_tokens`."""
    mask_no_eos_with_zero: bool = False
    """A sequence that was cut off before end-of-sequence gets reward 0 (batch key `truncated`)."""
    reward_norm: RewardNorm | None = None
    """MEAN/STD: the set of rewards whose mean is subtracted from a sequence's reward, and the set
    whose standard deviation then divides the result. Each is `group`, `batch` or `none`; MEAN can
    also be `leave1out` (the mean of the group's other samples; a group of one gets 0). With STD
    `group`, the divisor is 1 if the group has one sample or its rewards are all equal. Rewards
    before the last token are scaled in the same way."""
    kl_ctl: Annotated[float, Ge(0)] = 0.0
    """Weight of the KL penalty in the token rewards. The penalty compares the policy at the start
    of the update with the reference (`reference_logprobs`)."""
    kl_loss_ctl: Annotated[float, Ge(0)] = 0.0
    """Weight of the policy's KL divergence from the reference in the loss. The gradient is that of
    the divergence, no matter which estimator the metric uses."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    """The estimator of the KL divergence (joschu.net/blog/kl-approx.html)."""
    entropy_ctl: float = 0.0
    """Weight of an entropy bonus in the loss, which keeps the policy's entropy high."""
    discount: Annotated[float, Ge(0), Le(1)] = field(default=1.0, metadata=_NOT_A_KEY)
    """GAE's gamma."""
    gae_lambda: Annotated[float, Ge(0), Le(1)] = 1.0
    """GAE's lambda; a value below 1 needs a critic. With 1, an advantage depends on all later
    rewards of the answer; with 0, on the token's own reward and the critic's value of the next
    token."""
    critic: bool = field(default=False, metadata=_NOT_A_KEY)
    """Advantages are taken over a critic's values: the experiment has a `critic`."""
    adv_norm: AdvantageNorm | None = "batch/batch"
    """MEAN/STD as for `reward_norm`, but over the advantages of all loss tokens of the batch; MEAN
    and STD are each `batch` or `none`."""

    @property
    def decoupled(self) -> bool:
        """Whether tokens are weighted by exp(proximal - behavior)."""
        return self.prox_logp_method in ("recompute", "loglinear")

    @property
    def selects_tokens(self) -> bool:
        """Whether the tokens to train on are chosen before a step."""
        return self.behavior_weight_mode == "second_moment" and self.decoupled


@dataclass
class CriticConfig:
    """PPO's value model: the actor's layers with a scalar head, trained beside the actor.

    It uses the actor's precision, ranks and micro-batches. It starts with the actor's weights and a
    head of zeros.
    """

    lr: Annotated[float, Gt(0)] = 1e-5
    """Peak learning rate; the other optimizer settings are the actor's."""
    warmup_steps: Annotated[int, Ge(0)] = 0
    """Number of train steps at the start of a run that train only the critic."""

    def engine(self, actor: PPOActorConfig) -> TrainEngineConfig:
        """Returns the configuration of its engine."""
        shared = {item.name: getattr(actor, item.name) for item in fields(TrainEngineConfig)}
        assert actor.optimizer is not None  # an experiment with a critic and without one is refused
        own = {"optimizer": replace(actor.optimizer, lr=self.lr), "scalar": True, "reference": None}
        return TrainEngineConfig(**shared | own)
