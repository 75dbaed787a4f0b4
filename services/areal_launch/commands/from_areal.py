"""Converts AReaL's experiment files to ours, key by key: `areal config --from-areal FILE`.

    their YAML ── RULES ──> our keys ──> YAML
                    └─────> comments: what has no key here, and what to do instead

A key that is missing in AReaL's file has AReaL's default, which is written out if ours differs, so
the converted file trains with the same numbers. RULES knows the keys of AReaLite, 0.3 and 1.0, and
becomes the table of docs/migration.md.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from areal.config.experiment import GRPOConfig, build_config
from areal.config.training import AdvantageNorm, RewardNorm
from areal.errors import ArealError, ConfigError

# AReaL 1.0.4's defaults that are not ours.
_DEFAULTS: dict[str, Any] = {
    "seed": 1,
    "gconfig.max_new_tokens": 16384,
    "rollout.max_head_offpolicyness": 0,
    "actor.ppo_n_minibatches": 4,
    "actor.behavior_weight_mode": "token_mask",
    "actor.kl_ctl": 0.1,
    "actor.reward_norm": None,
    "actor.adv_norm": None,
    "actor.optimizer.lr": 1e-3,
    "actor.optimizer.weight_decay": 0.01,
    "actor.optimizer.warmup_steps_proportion": 0.001,
    "model.context_length": 32768,
}


# Keys for which null is a choice of its own, not the default.
_MAY_BE_NULL = {
    "actor.eps_clip_higher", "actor.c_clip", "actor.behavior_weight_cap",
    "actor.reward_norm", "actor.adv_norm",
}  # fmt: skip


@dataclass
class Converted:
    """The converted keys, and notes about keys that have no counterpart."""

    keys: dict[str, Any] = field(default_factory=dict)
    """Dotted key to value."""
    notes: dict[str, list[str]] = field(default_factory=dict)
    """What to do instead, with the keys to which this applies."""

    def note(self, key: str, instead: str) -> None:
        """Adds a key to those to which `instead` applies."""
        self.notes.setdefault(instead, []).append(key)


Apply = Callable[[Converted, Any], None]


@dataclass(frozen=True)
class Rule:
    """How to convert one of AReaL's keys, or a section, that needs more than a new name."""

    says: str
    """Text for a person who converts the file by hand."""
    apply: Apply | None = None
    """Sets our keys; None: there are none, and `says` is written to the file as a comment."""


def _allocation(out: Converted, text: str) -> None:
    form = r"(sglang|vllm)?[.:]?([a-z0-9]+)([+|])(?:(fsdp|megatron|archon)[.:])?([a-z0-9]+)"
    match = re.fullmatch(form, str(text))
    if match is None:
        raise ConfigError(f"allocation_mode {text!r}: expected e.g. sglang:d4+fsdp:d2t2")
    rollout, actor = f"{match[1] or 'sglang'}:{match[2]}", f"{match[4] or 'fsdp'}:{match[5]}"
    _backends(out, rollout, actor, match[3])


def _backends(out: Converted, rollout: str, actor: str, join: str = "+") -> None:
    halves = []
    for key, backend, ours in (("rollout", rollout, "sglang"), ("actor", actor, "fsdp")):
        name, _, sizes = backend.partition(":")
        if name != ours:
            out.note(f"{key}.backend {name}", f"here it is {ours}")
        if pipeline := re.search(r"p(?!1(?!\d))\d+", sizes):
            out.note(f"{key} {pipeline[0]}", "no pipeline parallelism here; its ranks are left out")
        halves.append(f"{ours}:" + (re.sub(r"p\d+|[tce]1(?!\d)", "", sizes) or "d1"))
    out.keys["allocation_mode"] = join.join(halves)


def _name(key: str) -> Rule:
    def apply(out: Converted, value: Any) -> None:
        plain = re.sub(r"[^a-z0-9-]+", "-", str(value).lower()).strip("-")[:63]
        out.keys[key] = plain
        if plain != value:
            out.note(f"{key} {value!r}", f"is now {plain!r}")

    return Rule(f"`{key}`, in lower-case letters, digits and dashes", apply)


def _norm(key: str, norm: Any, examples: str) -> Rule:
    """`norm` is the `Literal` of the values that our key takes."""

    def apply(out: Converted, value: Mapping[str, Any] | bool | None) -> None:
        if isinstance(value, bool):  # AReaLite had a switch
            value = {} if value else None
        if value is None:
            out.keys[key] = None
            return
        mean = value.get("mean_level", "batch") or "none"
        if value.get("mean_leave1out") and mean == "batch":
            out.note(f"{key}.mean_leave1out", "only the mean of a group can leave a sample out")
        elif value.get("mean_leave1out") and mean == "group":
            mean = "leave1out"
        for name, usual in (("std_unbiased", True), ("eps", 1e-5)):
            if value.get(name, usual) != usual:
                out.note(f"{key}.{name}", "cannot be set; the value is the same in all runs")
        std = value.get("std_level", "batch") or "none"
        ours = None if mean == std == "none" else f"{mean}/{std}"
        if ours is not None and ours not in get_args(norm):
            out.note(f"{key} {ours}", f"has no counterpart and is off; there are {examples}")
            ours = None
        out.keys[key] = ours

    return Rule(f"`{key}` as MEAN/STD: {examples}", apply)


def _group_reward_norm(out: Converted, value: bool) -> None:
    out.keys["actor.reward_norm"] = "group/group" if value else None


def _top_k(out: Converted, value: int) -> None:
    out.keys["gconfig.top_k"] = -1 if value >= 10**6 else value


def _transport(out: Converted, value: str) -> None:
    out.keys["weight_sync.transport"] = "disk" if value == "disk" else "distributed"


def _loss_level(out: Converted, value: str) -> None:
    if value == "sequence":
        out.keys["actor.loss_type"] = "gspo"


def _rejection(out: Converted, value: Mapping[str, Any] | None) -> None:
    if value is None:
        return
    how = value.get("level", "token"), value.get("action", "mask"), value.get("metric", "ratio")
    modes = {
        ("token", "mask", "ratio"): "token_mask",
        ("token", "clamp", "ratio"): "token_truncate",
    }
    if how not in modes or value.get("lower") is not None:
        given = ", ".join(f"{key} {each}" for key, each in value.items())
        out.note(f"actor.rejection_sampling ({given})", "only an upper bound on a token's ratio")
    if how in modes:
        out.keys["actor.behavior_weight_mode"] = modes[how]
        out.keys["actor.behavior_weight_cap"] = float(value.get("upper", 5.0))


def _second_moment(out: Converted, value: float | None) -> None:
    if value is not None:
        out.keys["actor.behavior_weight_mode"] = "second_moment"
        out.keys["actor.behavior_weight_cap"] = value


def _loss(name: str) -> Rule:
    def apply(out: Converted, value: bool) -> None:
        if value:
            out.keys["actor.loss_type"] = name

    return Rule(f"`actor.loss_type: {name}`", apply)


def _reference(out: Converted, value: Mapping[str, Any] | None) -> None:
    if value is not None:
        out.keys["ref.path"] = str(value.get("path", ""))
        out.keys["ref.offload"] = bool(value.get("offload", False))


def _server_flag(key: str) -> Rule:
    flag = f"--{key.replace('_', '-')}"

    def apply(out: Converted, value: Any) -> None:
        if value is None or value is False:
            return
        before = out.keys.get("stack.inference_command", "python -m sglang.launch_server")
        words = flag if value is True else f"{flag} {value}"
        out.keys["stack.inference_command"] = f"{before} {words}"

    return Rule(f"`{flag}` in `stack.inference_command`", apply)


def _optimizer(out: Converted, value: str) -> None:
    kinds = {"adam": "adamw", "adamw": "adamw", "muon": "muon"}
    if value in kinds:
        out.keys["actor.optimizer.type"] = kinds[value]
    else:
        out.note(f"actor.optimizer.type {value!r}", f"expected one of {', '.join(kinds)}")


def _only(key: str, supported: tuple[str, ...], ours: str | None = None) -> Rule:
    """Converts a choice of which we support only some values."""

    def apply(out: Converted, value: str) -> None:
        if value not in supported:
            out.note(f"{key} {value!r}", f"expected one of {', '.join(supported)}")
        elif ours is not None:
            out.keys[ours] = value

    known = " or ".join(f"`{each}`" for each in supported)
    return Rule(f"`{ours}`: {known}" if ours else f"{known} only", apply)


def _if_set(key: str, instead: str) -> Rule:
    """Adds a comment only if the value is not empty, 0 or false."""

    def apply(out: Converted, value: Any) -> None:
        if value:
            out.note(f"{key} {value!r}", instead)

    return Rule(instead, apply)


_SAME = (
    "seed", "total_train_steps", "train_dataset.path", "train_dataset.batch_size",
    "gconfig.n_samples", "gconfig.max_new_tokens", "gconfig.temperature", "gconfig.top_p",
    "gconfig.stop_token_ids", "rollout.max_concurrent_rollouts", "rollout.max_head_offpolicyness",
    "actor.gradient_checkpointing", "actor.mb_spec.max_tokens_per_mb",
    "actor.optimizer.lr", "actor.optimizer.weight_decay", "actor.optimizer.beta2",
    "actor.optimizer.lr_scheduler_type", "actor.optimizer.min_lr_ratio",
    "actor.optimizer.warmup_steps_proportion", "actor.optimizer.gradient_clipping",
    "actor.ppo_n_minibatches", "actor.eps_clip", "actor.eps_clip_higher", "actor.c_clip",
    "actor.reward_scaling", "actor.reward_clip", "actor.overlong_tokens",
    "actor.mask_no_eos_with_zero", "actor.kl_ctl", "actor.kl_estimator",
)  # fmt: skip
_SERVER_FLAGS = (
    "attention_backend", "chunked_prefill_size", "cuda_graph_max_bs", "disable_cuda_graph",
    "disable_radix_cache", "enable_torch_compile", "kv_cache_dtype", "max_prefill_tokens",
    "mem_fraction_static", "sampling_backend", "schedule_policy",
)  # fmt: skip
_ELSEWHERE = Rule("`areal run --on local`, `slurm`, `ray` or `kubernetes`")
_IN_RECIPE = "the recipe decides this"
_TOKENIZER = Rule("the tokenizer is read from `model.path`")
_LAYOUT = Rule("`allocation_mode` contains the layout: `fsdp:d8t2c2e4`")
_AUTOMATIC = Rule("chosen automatically, from the installed packages and the model")

# The rule of a section holds for those of its keys that have none of their own.
RULES: dict[str, str | Rule] = {
    **{key: key for key in _SAME},
    "experiment_name": _name("experiment_name"),
    "trial_name": _name("trial_name"),
    "allocation_mode": Rule(
        "`allocation_mode`, such as `sglang:d4+fsdp:d2t2`; `vllm`, `megatron` and `p` (pipeline "
        "parallelism) have no counterpart",
        _allocation,
    ),
    "total_train_epochs": Rule("`total_train_steps` = epochs * rows / `train_dataset.batch_size`"),
    "total_train_n_seqs": Rule("set `total_train_steps` instead"),
    "async_training": Rule(
        "the recipe calls `prepare_batch` (generation runs ahead) or `rollout_batch` (generation "
        "and training take turns)"
    ),
    "cluster.fileroot": "run_root",
    "cluster.n_gpus_per_node": "stack.gpus_per_node",
    "cluster": Rule(
        "`allocation_mode` determines the number of nodes; services find each other automatically"
    ),
    "tokenizer_path": _TOKENIZER,
    "train_dataset": Rule("the recipe reads the rows itself"),
    "valid_dataset": Rule("the recipe reads the rows and calls `rollout.evaluate(rows, workflow)`"),
    "gconfig.top_k": Rule("`gconfig.top_k`; -1 turns it off", _top_k),
    "gconfig.max_tokens": "model.context_length",
    "gconfig.stop": _if_set(
        "gconfig.stop", "only token ids end a sample: `gconfig.stop_token_ids`"
    ),
    "gconfig.greedy": _if_set("gconfig.greedy", "greedy samples cannot be trained on"),
    "gconfig.min_new_tokens": _if_set(
        "gconfig.min_new_tokens", "a workflow sets it on its own `GenerationHyperparameters`"
    ),
    "gconfig": Rule("no counterpart"),
    "eval_gconfig": Rule("the recipe gives an evaluation its own `GenerationHyperparameters`"),
    "rollout.backend": Rule("the first half of `allocation_mode`"),
    "rollout.request_timeout": "rollout.request_timeout_s",
    "rollout.setup_timeout": "rollout.setup_timeout_s",
    "rollout.tokenizer_path": _TOKENIZER,
    "rollout": Rule("not needed: the ledger queues and retries tasks"),
    "actor.backend": Rule("the second half of `allocation_mode`"),
    "actor.path": "model.path",
    "actor.dtype": _only("actor.dtype", ("bfloat16", "float32"), "actor.dtype"),
    "actor.temperature": Rule("`gconfig.temperature` applies to sampling and to training"),
    "actor.mb_spec": Rule(
        "no counterpart; only the token budget, `actor.mb_spec.max_tokens_per_mb`, can be set"
    ),
    "actor.optimizer.type": Rule(
        "`actor.optimizer.type`: `adam` and `adamw` are `adamw` here; `muon`", _optimizer
    ),
    "actor.optimizer": Rule("cannot be set; the value is the same in all runs"),
    "actor.weight_update_mode": Rule(
        "`weight_sync.transport`: `disk` for AReaL's `disk`, `distributed` for its other modes",
        _transport,
    ),
    "actor.reward_norm": _norm(
        "actor.reward_norm", RewardNorm, "`group/group`, `leave1out/none`, …"
    ),
    "actor.group_reward_norm": Rule("`actor.reward_norm: group/group`", _group_reward_norm),
    "actor.adv_norm": _norm(
        "actor.adv_norm", AdvantageNorm, "`batch/batch`, `batch/none` or `none/batch`"
    ),
    "actor.reward_bias": _if_set("actor.reward_bias", "the reward function adds it"),
    "actor.use_decoupled_loss": Rule(
        "`actor.prox_logp_method`: `recompute` or `loglinear` for true, `unweighted` or "
        "`behavior` for false"
    ),
    "actor.recompute_logprob": Rule(
        "without the decoupled loss, `actor.prox_logp_method`: `unweighted` for true, `behavior` "
        "for false"
    ),
    "actor.behav_imp_weight_cap": "actor.behavior_weight_cap",
    "actor.rejection_sampling": Rule(
        "`actor.behavior_weight_cap` for its `upper`, and `actor.behavior_weight_mode` for its "
        "`level` and `action`",
        _rejection,
    ),
    "actor.importance_sampling_level": Rule("for `sequence`, `actor.loss_type: gspo`", _loss_level),
    "actor.overlong_reward_penalty": Rule("for true, set `actor.overlong_tokens` above 0"),
    "actor.overlong_penalty_factor": Rule("cannot be set; it is always 1"),
    "actor.init_from_scratch": _if_set("actor.init_from_scratch", _IN_RECIPE),
    "actor.attn_impl": Rule("`actor.attn_impl`; the default tries the installed kernels"),
    **dict.fromkeys([f"actor.{key}" for key in ("use_kernels", "pad_to_maximum")], _AUTOMATIC),
    **dict.fromkeys([f"actor.{key}" for key in ("megatron", "archon", "fsdp")], _LAYOUT),
    "actor.m2_threshold": Rule("`actor.behavior_weight_mode: second_moment`", _second_moment),
    "actor.use_sapo_loss": _loss("sapo"),
    "actor.use_cispo_loss": _loss("cispo"),
    "actor.use_lora": Rule("`actor.lora`; with null, the whole model is trained"),
    "actor.lora_rank": Rule("`actor.lora.rank`"),
    "actor.lora_alpha": Rule("`actor.lora.alpha`"),
    "actor.target_modules": Rule(
        "`actor.lora.targets`; an empty list means all linear layers except the head"
    ),
    "actor": Rule("no counterpart"),
    "ref": Rule(
        "`ref.path` and `ref.offload`; its other settings are those of `actor`", _reference
    ),
    "critic": Rule("`algorithm: ppo` and `critic.lr`; its other settings are those of `actor`"),
    "teacher": Rule(
        "`teacher`, a folder or a server's URL, in a recipe like `examples/on_policy_distill.py`"
    ),
    "sglang.context_length": "model.context_length",
    "sglang.max_running_requests": "stack.inference_max_running",
    "sglang.dtype": _only("sglang.dtype", ("bfloat16", "float32"), "model.dtype"),
    "sglang.model_path": Rule("`model.path`"),
    **{f"sglang.{key}": _server_flag(key) for key in _SERVER_FLAGS},
    "sglang": Rule("add the flag to `stack.inference_command` if you need it"),
    "vllm": Rule("not supported; use SGLang"),
    "recover.freq_steps": "checkpoint.freq_steps",
    "recover": Rule("a trial always resumes from its newest checkpoint"),
    "saver": Rule(
        "`checkpoint.freq_steps`; `areal versions export` writes a checkpoint as a Hugging Face "
        "folder"
    ),
    "checkpointer": Rule("`checkpoint.freq_steps`"),
    "evaluator": Rule(
        "the recipe calls `rollout.evaluate(rows, workflow)` wherever you want an evaluation"
    ),
    "stats_logger": Rule("`metrics.jsonl` in the run folder, and Prometheus"),
    "perf_tracer": Rule("OpenTelemetry traces: docs/tracing.md"),
    "memory_profiler": Rule("`train/peak_gib` in each row of `metrics.jsonl`"),
    "launcher": _ELSEWHERE,
    "scheduler": _ELSEWHERE,
    "server_only": Rule("`areal up` starts a stack without a trainer"),
    "enable_offload": Rule("`allocation_mode` with `@alternating`: both share the GPUs, in turns"),
}


def convert(theirs: Mapping[Any, Any]) -> Converted:
    """Returns AReaL's experiment file with our keys.

    Args:
        theirs: AReaL's experiment file, with references (`${actor.path}`) resolved.

    Raises:
        ConfigError: `allocation_mode` has a form that is not known.
    """
    out, values = Converted(dict(_DEFAULTS)), dict(_flat(theirs))
    _layout(out, values)
    if not values.pop("actor.overlong_reward_penalty", False):
        values.pop("actor.overlong_tokens", None)
    out.keys["actor.prox_logp_method"] = _proximal(values)
    out.keys |= _lora(values)
    for key, value in values.items():
        rule = _rule(key)
        if rule is None:
            out.keys[key] = value
            out.note(key, "not a key of AReaL; kept for the recipe's own config class")
        elif isinstance(rule, str):
            if value is not None or rule in _MAY_BE_NULL:
                out.keys[rule] = value
        elif rule.apply is not None:
            rule.apply(out, value)
        elif value:  # what is off needs no counterpart
            out.note(key, rule.says)
    return out


def _layout(out: Converted, values: dict[str, Any]) -> None:
    """Converts `allocation_mode` or, if it is not set, the two backends of 1.0."""
    backends = {key: values.pop(key, None) or "" for key in ("rollout.backend", "actor.backend")}
    if not values.get("allocation_mode"):
        values.pop("allocation_mode", None)
        if all(backends.values()):
            _backends(out, *map(str, backends.values()))
            return
    for key, value in backends.items():
        if value:
            out.note(
                f"{key} {value!r}",
                "not used: `allocation_mode` is set, or the other backend is missing",
            )


def _proximal(values: dict[str, Any]) -> str:
    """Returns which logprobs the ratio is clipped around."""
    decoupled = bool(values.pop("actor.use_decoupled_loss", False))
    recompute = bool(values.pop("actor.recompute_logprob", False))
    method = str(values.pop("actor.prox_logp_method", "recompute"))
    if decoupled:
        return "loglinear" if method == "loglinear" else "recompute"
    return "unweighted" if recompute else "behavior"


def _lora(values: dict[str, Any]) -> dict[str, Any]:
    """Returns our LoRA section if theirs is on; missing values have AReaL's defaults."""
    rank, alpha = values.pop("actor.lora_rank", 32), values.pop("actor.lora_alpha", 16)
    targets = values.pop("actor.target_modules", None) or []
    targets = [targets] if isinstance(targets, str) else targets
    if not values.pop("actor.use_lora", False):
        return {}
    named = [each for each in targets if each != "all-linear"]
    return {"actor.lora.rank": rank, "actor.lora.alpha": alpha, "actor.lora.targets": named}


def _rule(key: str) -> str | Rule | None:
    """Returns the rule of a key, or else of the nearest section around it."""
    while key not in RULES and "." in key:
        key = key.rpartition(".")[0]
    return RULES.get(key)


def _flat(section: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields dotted keys and values; a section stays whole if it has a rule and its keys do not."""
    for name, value in section.items():
        key = f"{prefix}{name}"
        inside = any(each.startswith(f"{key}.") for each in RULES)
        if isinstance(value, Mapping) and (inside or key not in RULES):
            yield from _flat(value, f"{key}.")
        else:
            yield key, value


def converted_yaml(file: Path) -> str:
    """Converts an experiment file of AReaL to ours; comments say what has no key here.

    Raises:
        ConfigError: The file cannot be read, or a value is not understood.
    """
    try:
        theirs = OmegaConf.to_container(OmegaConf.load(file), resolve=True)
    except OSError as error:
        raise ConfigError(f"{str(file)!r}: cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{str(file)!r}: {' '.join(str(error).split())}") from None
    if not isinstance(theirs, dict):
        raise ConfigError(f"{str(file)!r}: expected a mapping at the top level")
    out = convert(theirs)
    tree: dict[str, Any] = {}
    for key, value in out.keys.items():
        section = tree
        *path, last = key.split(".")
        for name in path:
            section = section.setdefault(name, {})
        section[last] = value
    comments = [f"From {file.name} of AReaL."]
    if problem := _problem(tree):
        comments += [f"To fix: {problem}"]
    if out.notes:
        comments.append("Keys that have no counterpart here:")
        comments += [f"  {', '.join(keys)}: {instead}" for instead, keys in out.notes.items()]
    written = yaml.safe_dump(tree, sort_keys=False)
    return "".join(f"# {line}\n" for line in comments) + written


def _problem(tree: Mapping[str, Any]) -> str:
    """Returns what is wrong with the result, apart from the recipe's keys; "": nothing."""
    own = {key: value for key, value in tree.items() if key in GRPOConfig.__dataclass_fields__}
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", suffix=".yaml") as file:
        yaml.safe_dump(own, file)
        file.flush()
        try:
            build_config(GRPOConfig, Path(file.name))
        except ArealError as error:
            return str(error).removeprefix(f"{file.name}: ")
    return ""
