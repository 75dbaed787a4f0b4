"""Record what AReaL, verl and TRL compute on random inputs, as golden files for the unit tests.

Runs the functions out of the packages' own source, without installing them (their imports need GPUs
and clusters):

    pip download --no-deps --dest /tmp/wheels areal==1.0.4 verl==0.9.1 trl==1.16.0
    python tools/reference_goldens.py /tmp/wheels/{areal-1.0.4,verl-0.9.1,trl-1.16.0}-*.whl

writes tests/unit/areal_torch/algorithms/golden/{areal,verl,trl,trl_preference}.npz. Inputs and
outputs are padded [rows, columns] arrays in the packages' own alignment; the tests translate.
"""

from __future__ import annotations

import ast
import sys
import zipfile
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Optional
from unittest.mock import MagicMock

import numpy as np
import torch

GOLDEN = Path(__file__).parents[1] / "tests/unit/areal_torch/algorithms/golden"
SEEDS = range(4)


def definitions(wheel: Path, path: str, names: list[str], namespace: dict[str, Any]) -> None:
    """Executes named top-level definitions of a file of a wheel, without their registries."""
    with zipfile.ZipFile(wheel) as archive:
        tree = ast.parse(archive.read(path))
    # Methods too: they become functions.
    within = [n for top in tree.body for n in [top, *getattr(top, "body", [])]]
    found = [n for n in within if getattr(n, "name", None) in names]
    assert {n.name for n in found} == set(names), (path, names)
    for node in found:
        node.decorator_list = [d for d in node.decorator_list if ast.unparse(d) == "dataclass"]
        if isinstance(node, ast.ClassDef):
            for item in node.body:
                if isinstance(item, ast.FunctionDef):
                    keep = ("staticmethod", "torch.no_grad()")
                    item.decorator_list = [d for d in item.decorator_list if ast.unparse(d) in keep]
    future = ast.parse("from __future__ import annotations").body
    module = ast.Module(body=[*future, *found], type_ignores=[])
    exec(compile(module, path, "exec"), namespace)


def rows(seed: int) -> dict[str, torch.Tensor]:
    """Makes padded rows: prompts, then generated tokens with a stretch of tool output in some."""
    g = torch.Generator().manual_seed(seed)
    count, width = 8, 24
    lengths = torch.randint(8, width + 1, (count,), generator=g)
    lengths[0] = width
    prompts = torch.randint(2, 6, (count,), generator=g)
    column = torch.arange(width)
    attention = column < lengths[:, None]
    mask = attention & (column >= prompts[:, None])
    tool = (column >= 9) & (column < 12) & (torch.arange(count) % 2 == 0)[:, None]
    # The last token is generated, so that the outcome sits on a loss token.
    mask &= ~tool | (column == lengths[:, None] - 1)

    def normal(scale: float) -> torch.Tensor:
        return torch.randn(count, width, generator=g) * scale

    behavior = torch.where(mask, -normal(1.0).abs(), 0.0)
    proximal = torch.where(mask, behavior + normal(0.8), 0.0)
    return {
        "lengths": lengths,
        "attention": attention,
        "loss_mask": mask,
        "behavior_logprobs": behavior,
        "proximal_logprobs": proximal,
        "policy_logprobs": torch.where(mask, proximal + normal(0.5), 0.0),
        "reference_logprobs": torch.where(mask, behavior + normal(0.5), 0.0),
        "advantages": normal(1.0),
        "values": normal(0.5),
        "new_values": normal(0.5),
        "returns": normal(1.0),
        "scores": torch.randint(0, 4, (count,), generator=g).float(),
        "versions": torch.where(mask, torch.randint(0, 5, (count, width), generator=g), -1),
    }


def with_gradient(loss: Any, policy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a loss of the policy logprobs and its gradient."""
    policy = policy.clone().requires_grad_()
    value = loss(policy)
    value.backward()
    return value.detach(), policy.grad


def record_areal(wheel: Path) -> dict[str, np.ndarray]:
    """Runs AReaL's loss, critic loss, loglinear approximation and advantages."""
    ns: dict[str, Any] = {"torch": torch, "np": np, "dataclass": dataclass, "Any": Any}
    ns |= {"functools": __import__("functools"), "dist": torch.distributed}
    ns |= {"PROX_APPROX_METHOD_LOGLINEAR": "loglinear", "PROX_APPROX_METHOD_LINEAR": "linear"}
    ns |= {"PROX_APPROX_METHOD_ROLLOUT": "rollout"}
    definitions(wheel, "areal/utils/data.py", ["Normalization", "KLEstimator"], ns)
    names = ["_compute_sequence_level_ratio_and_advantages", "RejectionSamplingResult"]
    names += ["_check_bounds", "apply_rejection_sampling", "ppo_actor_loss_fn"]
    names += ["_mse_loss", "ppo_critic_loss_fn", "sapo_loss_fn"]
    definitions(wheel, "areal/utils/functional/functional.py", names, ns)
    actor = ["PPOActor", "compute_prox_logp_approximations"]
    actor += ["_apply_m2po_masking", "_get_m2po_loss_mask"]
    definitions(wheel, "areal/trainer/ppo/actor.py", actor, ns)
    out: dict[str, np.ndarray] = {}
    for seed in SEEDS:
        arrays = areal_case(ns, rows(seed))
        out |= {f"{seed}.{name}": array for name, array in arrays.items()}
    return out


def areal_case(ns: dict[str, Any], r: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Runs AReaL's functions on one set of rows."""
    out = {name: value.numpy() for name, value in r.items()}
    common = (r["proximal_logprobs"], r["behavior_logprobs"], r["advantages"])
    cap = SimpleNamespace(level="token", action="mask", metric="ratio", upper=2.0, lower=None)
    none = SimpleNamespace(level="token", action="mask", metric="ratio", upper=1e9, lower=None)
    cases = {
        "plain": {},
        "decoupled": {"rejection_sampling": none},
        "capped": {"rejection_sampling": cap, "eps_clip_higher": 0.28},
        "dual": {"rejection_sampling": cap, "c_clip": 1.5},
        "sequence": {"rejection_sampling": none, "importance_sampling_level": "sequence"},
        "truncated": {"rejection_sampling": SimpleNamespace(**{**vars(cap), "action": "clamp"})},
    }
    for name, options in cases.items():
        loss, grad = with_gradient(
            lambda p, o=options: ns["ppo_actor_loss_fn"](p, *common, 0.2, r["loss_mask"], **o)[0],
            r["policy_logprobs"],
        )
        out[f"{name}.loss"], out[f"{name}.grad"] = loss.numpy(), grad.numpy()
    loss, grad = with_gradient(
        lambda p: ns["sapo_loss_fn"](
            p, r["proximal_logprobs"], r["advantages"], 1.0, 1.05, r["loss_mask"]
        )[0],
        r["policy_logprobs"],
    )
    out["sapo.loss"], out["sapo.grad"] = loss.numpy(), grad.numpy()
    for threshold in (0.04, 0.3):
        kept = ns["_apply_m2po_masking"](*common[1::-1], r["loss_mask"], threshold)
        out[f"m2po.{threshold}"] = kept.numpy()
    loss, grad = with_gradient(
        lambda v: ns["ppo_critic_loss_fn"](v, r["values"], r["returns"], 0.2, r["loss_mask"])[0],
        r["new_values"],
    )
    out["critic.loss"], out["critic.grad"] = loss.numpy(), grad.numpy()
    approximation = ns["compute_prox_logp_approximations"](
        r["behavior_logprobs"], r["policy_logprobs"], r["versions"], 5, "loglinear"
    )
    out["loglinear"] = approximation["loglinear"].numpy()
    for name, gamma, lam, critic, kl in (
        ("grpo", 1.0, 1.0, False, 0.0),
        ("gae", 0.97, 0.9, True, 0.1),
    ):
        norm = SimpleNamespace(
            mean_level="group",
            mean_leave1out=False,
            std_level="group",
            std_unbiased=True,
            group_size=4,
            eps=1e-5,
        )
        batch_norm = SimpleNamespace(**{**vars(norm), "mean_level": "batch", "std_level": "batch"})
        config = SimpleNamespace(overlong_reward_penalty=False, use_decoupled_loss=True)
        this = SimpleNamespace(
            config=config,
            reward_bias=-0.5,
            reward_scaling=2.0,
            reward_clip=3.0,
            reward_norm=ns["Normalization"](norm),
            adv_norm=ns["Normalization"](batch_norm),
            kl_ctl=kl,
            kl_estimator=ns["KLEstimator"]("k3"),
            mask_no_eos_with_zero=not critic,
            discount=gamma,
            gae_lambda=lam,
        )
        data = {
            "input_ids": torch.zeros_like(r["attention"], dtype=torch.int64),
            "attention_mask": r["attention"],
            "loss_mask": r["loss_mask"],
            "logprobs": r["behavior_logprobs"].clone(),
            "ref_logp": torch.roll(r["reference_logprobs"], -1, -1),
            "rewards": r["scores"].clone(),
        }
        if critic:
            data["values"] = r["values"].clone()
        result = ns["PPOActor"]._compute_advantages(this, data)
        out[f"{name}.advantages"] = result["advantages"].numpy()
        out[f"{name}.returns"] = result["returns"].numpy()
    return out


def record_verl(wheel: Path) -> dict[str, np.ndarray]:
    """Runs verl's advantages, losses, aggregations, KL terms and rollout weights."""
    functional: dict[str, Any] = {"torch": torch}
    names = ["masked_sum", "masked_mean", "masked_var", "masked_whiten", "clip_by_value"]
    definitions(wheel, "verl/utils/torch_functional.py", names, functional)
    ns: dict[str, Any] = {"torch": torch, "np": np, "Any": Any, "defaultdict": defaultdict}
    ns["verl_F"] = SimpleNamespace(**{n: functional[n] for n in names})
    ns["ActorConfig"], ns["AlgoConfig"], ns["Optional"] = SimpleNamespace, dict, Optional
    names = ["compute_gae_advantage_return", "compute_grpo_outcome_advantage", "agg_loss"]
    names += ["compute_rloo_outcome_advantage", "compute_policy_loss", "kl_penalty_forward"]
    names += ["compute_policy_loss_cispo", "compute_policy_loss_gspo", "compute_policy_loss_sapo"]
    names += ["compute_policy_loss_vanilla", "kl_penalty"]
    names += ["compute_reinforce_plus_plus_outcome_advantage", "compute_value_loss"]
    names += ["compute_reinforce_plus_plus_baseline_outcome_advantage"]
    definitions(wheel, "verl/trainer/ppo/core_algos.py", names, ns)
    ns["SAFETY_BOUND"] = 20.0
    ns["compute_is_metrics"] = lambda **_: {}
    names = ["_parse_rollout_is_threshold", "compute_rollout_correction_weights"]
    definitions(wheel, "verl/trainer/ppo/rollout_corr_helper.py", names, ns)
    out: dict[str, np.ndarray] = {}
    for seed in SEEDS:
        arrays = verl_case(ns, rows(100 + seed))
        out |= {f"{seed}.{name}": array for name, array in arrays.items()}
    return out


def verl_case(ns: dict[str, Any], r: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Runs verl's functions on one set of rows."""
    out = {name: value.numpy() for name, value in r.items()}
    mask = r["loss_mask"].float()
    # Uneven groups.
    index = np.array([0, 0, 0, 1, 1, 2, 2, 2])
    out["index"] = index
    place = torch.zeros_like(mask)
    place[torch.arange(8), r["lengths"] - 1] = r["scores"]
    grpo = ns["compute_grpo_outcome_advantage"](place, mask, index, 1e-5)
    rloo = ns["compute_rloo_outcome_advantage"](place, mask, index)
    _, returns = ns["compute_gae_advantage_return"](place, r["values"], mask, 0.97, 0.9)
    out["grpo"], out["rloo"] = grpo[0].numpy(), rloo[0].numpy()
    out["gae.returns"] = returns.numpy()
    for kind in ("k1", "k2", "k3"):
        kl = ns["kl_penalty_forward"](r["behavior_logprobs"], r["reference_logprobs"], kind)
        out[kind] = kl.numpy()
    config = SimpleNamespace(
        clip_ratio=0.2, clip_ratio_low=0.2, clip_ratio_high=0.28, global_batch_info={}
    )
    cases = {
        "vanilla": lambda p: ns["compute_policy_loss"](
            r["proximal_logprobs"], p, r["advantages"], mask, 0.2, 0.2, 0.28, 1.5
        )[0],
        "cispo": lambda p: ns["compute_policy_loss_cispo"](
            r["proximal_logprobs"], p, r["advantages"], mask, config=config
        )[0],
        "gspo": lambda p: ns["compute_policy_loss_gspo"](
            r["proximal_logprobs"], p, grpo[0], mask, "token-mean", config
        )[0],
    }
    sapo = SimpleNamespace(tau_pos=1.0, tau_neg=1.05, global_batch_info={})
    cases["sapo"] = lambda p: ns["compute_policy_loss_sapo"](
        r["proximal_logprobs"], p, r["advantages"], mask, config=sapo
    )[0]
    reference = r["reference_logprobs"]
    for kind in ("k1+", "k2", "k3+"):
        cases[f"loss.{kind}"] = lambda p, k=kind: ns["agg_loss"](
            ns["kl_penalty"](p, reference, k), mask, "token-mean"
        )
    vanilla = DictNamespace(
        clip_ratio=0.2, clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=3.0
    )
    for mode in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"):
        vanilla.global_batch_info = {"loss_scale_factor": 32}
        cases[f"agg.{mode}"] = lambda p, m=mode: ns["compute_policy_loss_vanilla"](
            r["proximal_logprobs"], p, r["advantages"], mask, m, vanilla
        )[0]
    for name, loss_of in cases.items():
        loss, grad = with_gradient(loss_of, r["policy_logprobs"])
        out[f"{name}.loss"], out[f"{name}.grad"] = loss.numpy(), grad.numpy()
    loss, grad = with_gradient(
        lambda v: ns["compute_value_loss"](v, r["returns"], r["values"], mask, 0.2)[0],
        r["new_values"],
    )
    out["critic.loss"], out["critic.grad"] = loss.numpy(), grad.numpy()
    discounted = SimpleNamespace(gamma=1.0)
    plus = ns["compute_reinforce_plus_plus_outcome_advantage"](place, mask, config=discounted)
    out["reinforce_pp"] = plus[0].numpy()
    # It subtracts the baselines from its argument, a sum.
    baseline = ns["compute_reinforce_plus_plus_baseline_outcome_advantage"](place, mask, index)
    out["reinforce_pp_baseline"] = baseline[0].numpy()
    ratio = r["proximal_logprobs"] - r["behavior_logprobs"]
    for level in ("token", "sequence"):
        for mode, threshold in (("truncate", "2.0"), ("mask", "1e-30_2.0")):
            weights = ns["compute_rollout_correction_weights"](ratio, mask, level, threshold)
            out[f"weight.{level}_{mode}"] = weights[0].numpy()
    return out


class DictNamespace(SimpleNamespace):
    """What verl's configurations are: attributes, and `get`."""

    def get(self, name: str, default: Any) -> Any:
        return getattr(self, name, default)


def record_trl(wheel: Path) -> dict[str, np.ndarray]:
    """Runs the loss of TRL's GRPOTrainer."""
    ns: dict[str, Any] = {"torch": torch, "nanmin": torch.amin, "nanmax": torch.amax}
    definitions(wheel, "trl/trainer/grpo_trainer.py", ["_compute_loss"], ns)
    out: dict[str, np.ndarray] = {}
    for seed in SEEDS:
        r = rows(200 + seed)
        arrays = {name: value.numpy() for name, value in r.items()}
        for name, settings in TRL_CASES.items():
            loss_of = partial(trl_loss, ns["_compute_loss"], r, **settings)
            loss, grad = with_gradient(loss_of, r["policy_logprobs"])
            arrays[f"{name}.loss"], arrays[f"{name}.grad"] = loss.numpy(), grad.numpy()
        out |= {f"{seed}.{name}": array for name, array in arrays.items()}
    return out


TRL_CASES: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo"},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "dapo": {"loss_type": "dapo"},
    "sapo": {"loss_type": "sapo"},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "kl": {"loss_type": "dapo", "beta": 0.1},
}


def trl_loss(
    compute_loss: Any, r: dict[str, torch.Tensor], policy: torch.Tensor, **settings: Any
) -> torch.Tensor:
    """Call the trainer's method with a trainer that has the settings alone."""
    mask = r["loss_mask"].float()
    defaults = {
        "importance_sampling_level": "token",
        "epsilon_low": 0.2,
        "epsilon_high": 0.28,
        "beta": 0.0,
    }
    trainer = MagicMock(**{**defaults, **settings})
    trainer.top_entropy_quantile, trainer.off_policy_mask_threshold = 1.0, None
    trainer.use_vllm = trainer.aux_loss_enabled = trainer._entropy_bonus_enabled = False
    trainer.current_gradient_accumulation_steps = trainer.args.steps_per_generation = 1
    trainer.accelerator.num_processes, trainer.max_completion_length = 1, 32
    trainer.accelerator.gather = trainer.accelerator.reduce = lambda x, **_: x
    trainer.args.delta, trainer.args.use_bias_correction_kl = None, True
    trainer.args.sapo_temperature_pos, trainer.args.sapo_temperature_neg = 1.0, 1.05
    trainer._get_per_token_logps_and_entropies.return_value = (
        policy,
        torch.zeros_like(policy),
        None,
    )
    ids = torch.zeros_like(mask, dtype=torch.int64)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": ids[:, :1] + 1,
        "completion_ids": ids,
        "completion_mask": mask,
        # One advantage for a sequence, as its own have.
        "advantages": r["advantages"][:, 0],
        "old_per_token_logps": r["proximal_logprobs"],
        # Near enough that no estimate is clamped, as TRL clamps none.
        "ref_per_token_logps": (r["proximal_logprobs"] + r["reference_logprobs"]) / 2,
        "num_items_in_batch": mask.sum(),
    }
    loss: torch.Tensor = compute_loss(trainer, trainer.model, inputs)
    return loss


def record_preference(wheel: Path) -> dict[str, np.ndarray]:
    """Runs the losses of TRL's DPOTrainer and CPOTrainer: rows of the first half are the chosen."""
    ns: dict[str, Any] = {"torch": torch, "F": torch.nn.functional}
    definitions(wheel, "trl/experimental/cpo/cpo_trainer.py", ["cpo_loss"], ns)
    dpo = dpo_statements(wheel)
    out: dict[str, np.ndarray] = {}
    for seed in SEEDS:
        r = rows(300 + seed)
        mask = r["loss_mask"].float()
        arrays = {name: value.numpy() for name, value in r.items()}

        def trl_dpo(policy: torch.Tensor, kind: str, r: Any = r, mask: Any = mask) -> Any:
            scores = ((policy - r["reference_logprobs"]) * mask).sum(1)
            names = {"chosen_scores": scores[:4], "rejected_scores": scores[4:], "F": ns["F"]}
            names |= {"completion_mask": mask, "zip": zip}
            settings = {"beta": 0.3, "loss_types": [kind], "loss_weights": [1.0]}
            names["self"] = SimpleNamespace(**settings, use_weighting=False)
            exec(dpo, names)
            return names["loss"]

        def trl_simpo(policy: torch.Tensor, mask: Any = mask) -> torch.Tensor:
            means = (policy * mask).sum(1) / mask.sum(1)
            trainer = MagicMock(beta=2.0, simpo_gamma=0.7, loss_type="simpo", alpha=0.0)
            trainer.label_smoothing, trainer.accelerator.device = 0.0, "cpu"
            losses: torch.Tensor = ns["cpo_loss"](trainer, means[:4], means[4:])[0]
            return losses.mean()

        cases = {"dpo": partial(trl_dpo, kind="sigmoid"), "ipo": partial(trl_dpo, kind="ipo")}
        for name, loss_of in {**cases, "simpo": trl_simpo}.items():
            loss, grad = with_gradient(loss_of, r["policy_logprobs"])
            arrays[f"{name}.loss"], arrays[f"{name}.grad"] = loss.numpy(), grad.numpy()
        out |= {f"{seed}.{name}": array for name, array in arrays.items()}
    return out


def dpo_statements(wheel: Path) -> Any:
    """The statements of DPOTrainer from the difference of the scores to the loss."""
    with zipfile.ZipFile(wheel) as archive:
        tree = ast.parse(archive.read("trl/trainer/dpo_trainer.py"))
    for node in ast.walk(tree):
        body = [
            ast.unparse(each) for each in getattr(node, "body", []) if isinstance(each, ast.stmt)
        ]
        found = [n for n, text in enumerate(body) if text.startswith("delta_score =")]
        if found and isinstance(node, ast.FunctionDef):
            chosen = node.body[found[0] : found[0] + 3]
            assert isinstance(chosen[-1], ast.For)
            return compile(ast.Module(body=chosen, type_ignores=[]), "dpo_trainer.py", "exec")
    raise AssertionError("trl/trainer/dpo_trainer.py has no delta_score")


def main() -> None:
    """Writes the files; the package versions are recorded in them."""
    GOLDEN.mkdir(parents=True, exist_ok=True)
    wheels = [Path(each) for each in sys.argv[1:]]
    records = {"areal": record_areal, "verl": record_verl, "trl": record_trl}
    records["trl_preference"] = record_preference
    for (name, record), wheel in zip(records.items(), [*wheels, wheels[-1]], strict=True):
        package, version = wheel.name.split("-")[:2]
        arrays = record(wheel)
        arrays["version"] = np.array(f"{package} {version}")
        np.savez_compressed(GOLDEN / f"{name}.npz", **arrays)
        print(f"{package} {version}: {len(arrays)} arrays")


if __name__ == "__main__":
    main()
