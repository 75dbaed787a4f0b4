"""PPO for a policy: proximal logprobs, advantages, updates. No service is called here.

GRPO, RLOO, Dr. GRPO, DAPO, REINFORCE++, GSPO, CISPO, SAPO, M2PO and others are settings of
`PPOActorConfig` (`areal.config.presets`, docs/algorithms.md).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from areal.config.checks import check
from areal.config.learning_rules import needs_several
from areal.config.losses import LOSSES, check_constants
from areal.config.training import PPOActorConfig
from areal.errors import InvalidInput, TrainingDiverged
from areal_torch.algorithms import advantages as adv
from areal_torch.algorithms import behavior, losses, normalization, packing, penalties
from areal_torch.algorithms.packing import Batch
from areal_torch.engines.formulas import Formula
from areal_torch.engines.model.heads import Head, LogprobHead
from areal_torch.engines.train_api import TrainEngine

# Ways to the proximal logprobs that need those of the policy at the start of the update.
_FORWARD = ("recompute", "unweighted")
# Statistics of minibatches that add up; all others are averaged (or maximized, `_max`).
_ADDED = frozenset(
    {"n_tokens", "n_loss_tokens", "n_micro_batches", "skipped_steps", "seconds"}
    | {"unrouted_sequences"}
    | {"forward_seconds", "backward_seconds", "optimizer_seconds"}
)


class PPOActor:
    """Trains a policy on batches of trajectories.

    Example:
        >>> actor = PPOActor(config, engine)
        >>> actor.compute_advantages(batch)
        >>> stats = actor.ppo_update(batch)
    """

    def __init__(
        self,
        config: PPOActorConfig,
        engine: TrainEngine,
        temperature: float = 1.0,
        *,
        loss: Callable[..., Any] | None = None,
        advantages: Callable[..., Any] | None = None,
        head: Head | None = None,
    ) -> None:
        """Trains `engine`'s model as `config` says.

        Args:
            config: The algorithm.
            engine: Initialized, or about to be.
            temperature: The sampler's, at which logprobs are compared.
            loss: A loss of the caller's own (see `areal_torch.engines.formulas`); None: that of
                `config.loss_type`.
            advantages: Takes the place of `reward_norm` and GAE; None: these.
            head: Computes logprobs and entropies, [N] each; None: `LogprobHead(temperature)`.

        Raises:
            InvalidInput: The loss is to be divided by a constant that is not known, or has no
                constant of that name; a function cannot be called.
        """
        check(config)
        if config.loss_aggregation == "constant" and not config.max_response_tokens:
            raise InvalidInput(
                "max_response_tokens=0: expected the length of the longest response, by which "
                "loss_aggregation='constant' divides"
            )
        self.config = config
        self.engine = engine
        self.temperature = temperature
        self.head = head or LogprobHead(temperature)
        self.builtin_loss = self._formula(getattr(losses, LOSSES[config.loss_type].function))
        check_constants(config.loss_type, config.loss_constants)
        self.loss = self.builtin_loss if loss is None else self._formula(loss)
        self.advantages = self._advantages(advantages)

    def _formula(self, function: Callable[..., Any]) -> Formula:
        config = self.config
        keys = ("eps_clip", "eps_clip_higher", "c_clip")
        constants = {key: getattr(config, key) for key in keys} | config.loss_constants
        return Formula(function, "loss", constants)

    def _advantages(self, function: Callable[..., Any] | None) -> Formula | None:
        if function is None:
            return None
        own = Formula(function, "advantages")
        if self.config.kl_ctl != 0.0 and not own.takes("token_rewards"):
            raise InvalidInput(
                f"{own}: actor.kl_ctl={self.config.kl_ctl} would have no effect: expected a "
                "parameter token_rewards, which include the KL penalty, or actor.kl_loss_ctl"
            )
        return own

    def compute_logprobs(self, batch: Batch) -> Tensor:
        """Returns the policy's logprobs of the loss tokens, [T], 0 elsewhere; collective."""
        return self.engine.forward(batch, self.head)

    def compute_advantages(
        self, batch: Batch, advantages: Callable[..., Any] | None = None
    ) -> None:
        """Adds `advantages` and `returns` to this rank's batch; collective.

        Rewards are shaped and normalized per sequence and placed on the last generated token. The
        KL penalty is subtracted, GAE turns the result into advantages, and these are normalized.
        `rewards` itself does not change. The KL penalty is that of the policy at the start of the
        update, not of the one that
        sampled: with `kl_ctl` a batch without `proximal_logprobs` takes a forward pass for them,
        and keeps them where `ppo_update` would compute them again.

        Args:
            batch: Needs rewards; with kl_ctl also reference_logprobs; with a critic also values.
            advantages: For this call, as in `__init__`.

        Raises:
            InvalidInput: The batch lacks a key that the `actor` section or the critic requires.
            WorkflowError: `advantages` raised, or returned numbers that are not finite.
        """
        own = self.advantages if advantages is None else self._advantages(advantages)
        config, mask, cu_seqlens = self.config, batch["loss_mask"], batch["cu_seqlens"]
        packing.check_batch(batch)
        if config.critic and "values" not in batch:
            raise InvalidInput(
                "batch has no 'values': expected batch['values'] = critic.compute_values(batch), "
                "since the experiment has a critic"
            )
        group = self.engine.process_group
        shaping = config if own is None else replace(config, reward_norm=None)
        scores, slopes = adv.shape_scores(batch, shaping, group)
        rewards = adv.place_scores(batch["rewards"], mask, cu_seqlens, scores, slopes)
        if config.kl_ctl != 0.0:
            _need_reference(batch, f"kl_ctl={config.kl_ctl}")
            proximal = batch.get("proximal_logprobs")
            if proximal is None:
                proximal = self.compute_logprobs(batch)
                if config.prox_logp_method in _FORWARD:
                    batch["proximal_logprobs"] = proximal
            kl = penalties.kl_estimate(proximal, batch["reference_logprobs"], config.kl_estimator)
            rewards = rewards - config.kl_ctl * torch.where(mask, kl, 0.0)
        if own is None:
            found, returns = adv.gae(
                rewards,
                mask,
                cu_seqlens,
                discount=config.discount,
                gae_lambda=config.gae_lambda,
                values=batch.get("values"),
                bootstrap_values=batch.get("bootstrap_values"),
            )
        else:
            given: dict[str, Any] = {"rewards": scores, "token_rewards": rewards}
            given["reduce_stats"] = self.engine.reduce_stats
            found = own.token_advantages(own({**batch, **given}), batch)
            values = torch.where(mask, batch["values"], 0.0) if "values" in batch else 0.0
            returns = found + values
        if config.adv_norm is not None:
            found = normalization.normalize_tokens(found, mask, config.adv_norm, group)
        # The float64 model is there to compare ranks to the last digits: do not round on the way.
        dtype = torch.float64 if config.dtype == "float64" else torch.float32
        batch["advantages"], batch["returns"] = found.to(dtype), returns.to(dtype)

    def ppo_update(self, batch: Batch, loss: Callable[..., Any] | None = None) -> dict[str, float]:
        """Takes `ppo_n_minibatches` optimizer steps (collective).

        Proximal logprobs are those of the weights at the start of the update. With several
        minibatches they take a forward pass of their own; with a single one they equal, to the bit,
        the policy logprobs of its only forward pass and are taken from there.

        Args:
            batch: This rank's share, after `compute_advantages`. `proximal_logprobs` are used if
                there.
            loss: For this call, as in `__init__`.

        Returns:
            Statistics, equal on all ranks: those of `TrainEngine.train_batch` and of the loss,
            averaged over minibatches by loss tokens (`behavior_weight`: over those that are kept;
            `kl`, with `kl_loss_ctl`: the estimate against the reference),
            `mismatch/kl` and `mismatch/max` of the first minibatch (see `behavior.mismatch`; absent
            if the current version sampled no sequence in it completely), with a mixture of experts
            `routed_ratio` (share of tokens computed with the server's choice) and
            `unrouted_sequences` (how many have none), and `reward`,
            `response_tokens` (means over sequences), `reward_std`, `reward_lowest`,
            `reward_highest`, `response_tokens_max`, `truncated` (share of sequences without an
            end), `groups_zero_std` (share of groups whose rewards are all equal; groups of one
            count where `reward_norm` makes their advantage 0), `advantage_abs`, `staleness`,
            `staleness_max` (policy version less a sequence's oldest token), `n_sequences`,
            `update_seconds`.

        Raises:
            TrainingDiverged: As `TrainEngine.train_batch` does.
            InvalidInput | WorkflowError: the loss returned something of another type or shape, or
                raised.
        """
        started = time.perf_counter()
        formula = self.loss if loss is None else self._formula(loss)
        config = self.config
        if "advantages" not in batch:
            raise InvalidInput("batch has no 'advantages': expected compute_advantages() first")
        for name in ("policy_logprobs", "entropies"):
            if name in batch:
                raise InvalidInput(
                    f"batch[{name!r}]: a loss gets the policy's own under this name: expected "
                    "another name"
                )
        if config.kl_loss_ctl != 0.0:
            _need_reference(batch, f"kl_loss_ctl={config.kl_loss_ctl}")
        stats = self.describe(batch)
        if self._needs_proximal_forward(batch):
            batch = {**batch, "proximal_logprobs": self.compute_logprobs(batch)}
        parts = [batch]
        if config.ppo_n_minibatches > 1:
            split = packing.split_minibatches(batch, config.ppo_n_minibatches)
            parts = [packing.select(batch, indices) for indices in split]
        results = [self.take_step(part, formula) for part in parts]
        stats |= combine(results)
        if "behavior_weight" in stats:
            dropped = stats["behavior_weight_capped_ratio"]
            if config.behavior_weight_mode.endswith("truncate"):
                dropped = 0.0
            kept = (1.0 - dropped) * stats["n_loss_tokens"]
            stats["behavior_weight"] *= stats["n_loss_tokens"] / max(round(kept), 1)
        if compared := results[0].get("mismatch_tokens", 0.0):
            # Later minibatches have other weights than those that sampled.
            stats["mismatch/kl"] = results[0]["mismatch_kl"] / compared
            stats["mismatch/max"] = results[0]["mismatch_max"]
        for name in ("mismatch_kl", "mismatch_max", "mismatch_tokens"):
            stats.pop(name, None)
        stats["update_seconds"] = time.perf_counter() - started
        return stats

    def take_step(self, batch: Batch, loss: Formula | None = None) -> dict[str, float]:
        """Takes one optimizer step on a (mini)batch; collective. See `TrainEngine.train_batch`.

        A batch of a failed step has `loss_weights` and `kept`, computed over all ranks; they are
        used.
        """
        config, mask, added = self.config, batch["loss_mask"], {}
        if config.loss_aggregation != "token_mean" and "loss_weights" not in batch:
            cu_seqlens = batch["cu_seqlens"]
            lengths = adv.sequence_sums(mask, cu_seqlens)
            counts = {"tokens": lengths.sum(), "sequences": (lengths > 0).sum()}
            added["loss_weights"] = losses.token_weights(
                mask,
                cu_seqlens,
                config.loss_aggregation,
                max_tokens=config.max_response_tokens,
                **self.engine.reduce_stats(counts),
            ).to(batch["advantages"].dtype)
        if config.selects_tokens and "kept" not in batch:
            # The policy just before this step: earlier minibatches have moved it.
            several = config.ppo_n_minibatches > 1
            current = self.compute_logprobs(batch) if several else batch["proximal_logprobs"]
            added["kept"] = behavior.second_moment_mask(
                current,
                batch["behavior_logprobs"],
                mask,
                config.behavior_weight_cap or math.inf,
                self.engine.process_group,
            )
        formula = loss or self.loss

        def loss_fn(policy: Tensor, entropies: Tensor, part: Batch) -> losses.LossResult:
            return self._loss(policy, entropies, part, formula)

        try:
            return self.engine.train_batch({**batch, **added}, loss_fn, head=self.head)
        except TrainingDiverged as error:
            if formula is self.builtin_loss:
                raise
            raise TrainingDiverged(
                f"{error}; the recipe's own {formula}",
                cause=error.cause,
                batch=error.batch,
                groups=error.groups,
            ) from None

    def _needs_proximal_forward(self, batch: Batch) -> bool:
        config = self.config
        if "proximal_logprobs" in batch:
            return False
        several = config.ppo_n_minibatches > 1
        return config.selects_tokens or (several and config.prox_logp_method in _FORWARD)

    def _proximal(self, policy_logprobs: Tensor, batch: Batch) -> Tensor:
        """Returns the logprobs around which the ratio is clipped."""
        config = self.config
        if config.prox_logp_method == "behavior":
            return batch["behavior_logprobs"]
        if "proximal_logprobs" in batch:
            return batch["proximal_logprobs"]
        if config.prox_logp_method == "loglinear":
            return behavior.loglinear_proximal_logprobs(
                policy_logprobs,
                batch["behavior_logprobs"],
                batch["token_versions"],
                batch["loss_mask"],
                self.engine.get_version(),
            )
        # A single minibatch: no weight has changed since the start of the update.
        return policy_logprobs.detach()

    def _loss(
        self,
        policy_logprobs: Tensor,
        entropies: Tensor,
        batch: Batch,
        formula: Formula | None = None,
    ) -> losses.LossResult:
        config, mask = self.config, batch["loss_mask"]
        if policy_logprobs.shape != mask.shape:
            raise InvalidInput(
                f"head {type(self.head).__name__}: its values have shape "
                f"{tuple(policy_logprobs.shape)}: expected logprobs {tuple(mask.shape)}"
            )
        proximal = self._proximal(policy_logprobs, batch)
        weight, weight_stats = self._weight(proximal, batch)
        formula = formula or self.loss
        given = {
            "policy_logprobs": policy_logprobs,
            "proximal_logprobs": proximal,
            "entropies": entropies,
        }
        each, stats_of_each = formula.token_losses(formula({**batch, **given}), policy_logprobs)
        counts = mask.to(each.dtype) if weight is None else weight
        if "loss_weights" in batch:
            counts = counts * batch["loss_weights"]
        loss, stats = losses.add_up(each, stats_of_each, mask, counts)
        stats |= weight_stats
        if config.kl_loss_ctl != 0.0 or config.entropy_ctl != 0.0:
            ratio = behavior.behavior_weight(policy_logprobs, proximal, mask, None)[0]
            importance = ratio if weight is None else ratio * weight
            if "loss_weights" in batch:
                importance = importance * batch["loss_weights"]
        if config.kl_loss_ctl != 0.0:
            reference = batch["reference_logprobs"]
            kl, stats["kl"] = penalties.kl_loss(
                policy_logprobs, reference, importance, mask, config.kl_estimator
            )
            loss = loss + config.kl_loss_ctl * kl
        if config.entropy_ctl != 0.0:
            bonus = penalties.entropy_bonus(policy_logprobs, entropies, importance, mask)
            loss = loss - config.entropy_ctl * bonus
        if "token_versions" in batch:
            stats |= behavior.mismatch(
                policy_logprobs,
                batch["behavior_logprobs"],
                batch["token_versions"],
                mask,
                batch["cu_seqlens"],
                self.engine.get_version(),
            )
        return loss, stats

    def _weight(self, proximal: Tensor, batch: Batch) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Returns each token's weight for what has changed since it was sampled; None: 1."""
        config, mask = self.config, batch["loss_mask"]
        if not config.decoupled:
            return None, {}
        mode, cap = config.behavior_weight_mode, config.behavior_weight_cap
        sampled = batch["behavior_logprobs"]
        if config.selects_tokens:
            kept = batch["kept"]
            weight, stats = behavior.behavior_weight(proximal, sampled, kept, None)
            return weight, {**stats, "behavior_weight_capped_ratio": (mask & ~kept).sum()}
        return behavior.behavior_weight(
            proximal, sampled, mask, cap, mode=mode, cu_seqlens=batch["cu_seqlens"]
        )

    def describe(self, batch: Batch) -> dict[str, float]:
        """Statistics of a batch before an update, over all ranks; see `ppo_update`."""
        mask, cu_seqlens = batch["loss_mask"], batch["cu_seqlens"]
        rewards = adv.sequence_sums(batch["rewards"], cu_seqlens)
        lengths = adv.sequence_sums(mask, cu_seqlens)
        of_one = needs_several(self.config)
        counted, equal = _equal_groups(rewards, batch["group_index"], of_one=of_one)
        sums: dict[str, Tensor | float] = {
            "n_sequences": float(len(rewards)),
            "reward": rewards.double().sum(),
            "response_tokens": mask.sum(),
            "response_tokens_max": lengths.max() if len(lengths) else 0.0,
            "truncated": batch["truncated"].sum() if "truncated" in batch else 0.0,
            "groups_zero_std": equal,
            "groups_counted": counted,
            "reward_highest_max": rewards.max() if len(rewards) else -math.inf,
            "reward_lowest_max": -rewards.min() if len(rewards) else -math.inf,
            "advantage_abs": batch["advantages"].abs().sum() if "advantages" in batch else 0.0,
            "staleness": 0.0,
            "staleness_max": 0.0,
        }
        if "token_versions" in batch and len(rewards):
            versions = batch["token_versions"]
            newest = torch.iinfo(torch.int64).max
            oldest = torch.full((len(rewards),), newest, device=mask.device).scatter_reduce_(
                0,
                packing.sequence_index(cu_seqlens),
                torch.where(versions >= 0, versions, newest),
                "amin",
            )
            version = self.engine.get_version()
            age = torch.where(oldest < newest, version - oldest, 0)
            sums["staleness"], sums["staleness_max"] = age.sum(), age.max()
        stats = self.engine.reduce_stats(sums)
        tokens, count = max(stats["response_tokens"], 1.0), max(stats["n_sequences"], 1.0)
        stats["advantage_abs"] /= tokens
        for name in ("reward", "response_tokens", "staleness", "truncated"):
            stats[name] /= count
        stats["groups_zero_std"] /= max(stats.pop("groups_counted"), 1.0)
        stats["reward_highest"] = stats.pop("reward_highest_max")
        stats["reward_lowest"] = -stats.pop("reward_lowest_max")
        # Around the mean of all ranks: the mean of the squares would lose what they differ by.
        spread = self.engine.reduce_stats(
            {"reward": (rewards.double() - stats["reward"]).square().sum()}
        )
        stats["reward_std"] = math.sqrt(spread["reward"] / max(count - 1.0, 1.0))
        return stats


def _equal_groups(rewards: Tensor, group_index: Tensor, *, of_one: bool) -> tuple[float, float]:
    """Returns the number of groups, and in how many of them all rewards are equal.

    Groups of one sequence are counted only with `of_one`.
    """
    _, place, counts = torch.unique(group_index, return_inverse=True, return_counts=True)
    lowest, highest = (
        rewards.new_zeros(len(counts)).scatter_reduce_(0, place, rewards, how, include_self=False)
        for how in ("amin", "amax")
    )
    counted = counts > (0 if of_one else 1)
    return float(counted.sum()), float((counted & (lowest == highest)).sum())


def _need_reference(batch: Batch, wanted_by: str) -> None:
    if "reference_logprobs" not in batch:
        raise InvalidInput(
            f"{wanted_by}: expected batch['reference_logprobs'], the batch has {sorted(batch)}"
        )


def combine(results: list[dict[str, float]]) -> dict[str, float]:
    """Joins the statistics of an update's minibatches."""
    combined = {}
    for name in dict.fromkeys(name for result in results for name in result):
        having = [result for result in results if name in result]
        values = [result[name] for result in having]
        if name in _ADDED:
            combined[name] = sum(values)
        elif name.endswith("_max") or name == "peak_gib":
            combined[name] = max(values)
        elif name == "lr":
            combined[name] = values[-1]
        elif name == "grad_norm":
            combined[name] = sum(values) / len(values)
        else:
            weights = [result["n_loss_tokens"] for result in having]
            total = max(sum(weights), 1.0)
            combined[name] = sum(v * w for v, w in zip(values, weights, strict=True)) / total
    combined["tokens_per_second"] = combined["n_tokens"] / combined["seconds"]
    return combined
