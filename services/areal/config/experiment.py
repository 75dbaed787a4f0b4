"""The experiment file: one schema for recipes, services and launchers.

One YAML holds the whole experiment. `areal run` resolves it once (defaults, file, overrides,
endpoints) and writes `config.yaml` into the run folder; every service is started with
`--config` on that file and reads its own section. A recipe may subclass `GRPOConfig` with fields
of its own; services ignore top-level keys they do not know, recipes and `areal run` refuse them.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast, get_args, get_origin, get_type_hints

import yaml
from annotated_types import Ge, Lt
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from areal.config.allocation import parse_allocation
from areal.config.checks import check
from areal.config.learning_rules import of_config
from areal.config.losses import check_constants
from areal.config.moved import hint_for
from areal.config.presets import Algorithm, preset
from areal.config.server_sources import parse_source
from areal.config.services import (
    BufferSection,
    CheckpointConfig,
    DatasetConfig,
    EndpointsConfig,
    ModelConfig,
    RewardSection,
    RolloutSection,
    SandboxSection,
    StackConfig,
    WeightSyncSection,
)
from areal.config.trackers import TrackerName
from areal.config.training import CriticConfig, PPOActorConfig, RefConfig
from areal.config.transports import TRANSPORTS, in_object_store
from areal.errors import ConfigError, did_you_mean
from areal.security import SecurityConfig, redact
from areal.types import GenerationHyperparameters

CPU_SETUP_S = 120.0
# SGLang's first start: imports, weights, kernels that are compiled, CUDA graphs.
GPU_SETUP_S = 1200.0
# A collective outlasts the start of a server, for which rank 0 may wait; but a rank that hangs
# should not hold GPUs for hours.
_COLLECTIVE_S = 600.0


@dataclass
class BaseExperimentConfig:
    """The fields that every experiment has."""

    experiment_name: str = "experiment"
    """Name of a group of trials: at most 63 lower-case letters, digits and dashes."""
    trial_name: str = "trial0"
    """Name of one run, of the same characters. Both names are part of Redis keys,
    NATS subjects and the path of the run folder."""
    seed: Annotated[int, Ge(0), Lt(2**32)] = 0
    """Seed of all random numbers in the trainer."""
    run_root: str = "runs"
    """Folder that contains the run folders, run_root/experiment_name/trial_name."""
    allocation_mode: str = "sglang:d2+fsdp:d1"
    """The inference servers and the layout of trainer ranks. In `sglang:d2t4`, `d` is the number of
    servers and `t` the tensor parallelism of each. In `fsdp:d8s4`, there are 8 data-parallel ranks,
    and the weights are sharded over 4 of them; `t`, `c` and `e` add tensor, context and expert
    parallelism. AReaL's older form, `sglang.d2p1t1+d1p1t1`, is accepted too; `p`, pipeline
    parallelism, must be 1. With only `fsdp:d1`, the recipe trains on dataset rows, and no server or
    service is started. In `sglang:d1|fsdp:d1`, servers and trainer use the same GPUs: at the same
    time if both fit into the memory (`@shared` at the end asks for it), else in turns
    (`@alternating`). `auto` lets `areal run` choose by the GPUs, their memory and the model's size.
    See docs/gpu.md."""
    recipe: str = ""
    """The recipe file; set by `areal run`."""
    model: ModelConfig = field(default_factory=ModelConfig)
    rollout: RolloutSection = field(default_factory=RolloutSection)
    reward: RewardSection = field(default_factory=RewardSection)
    sandbox: SandboxSection = field(default_factory=SandboxSection)
    buffer: BufferSection = field(default_factory=BufferSection)
    weight_sync: WeightSyncSection = field(default_factory=WeightSyncSection)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    tracker: TrackerName = "none"
    """Where the metrics of each step go in addition to metrics.jsonl; docs/metrics.md says where
    each tracker writes. A tracker needs the pip extra of the same name."""
    stack: StackConfig = field(default_factory=StackConfig)
    endpoints: EndpointsConfig = field(default_factory=EndpointsConfig)
    security: SecurityConfig = field(default_factory=SecurityConfig)

    @property
    def run_dir(self) -> Path:
        """The run's folder: `run_root/experiment_name/trial_name`."""
        return Path(self.run_root) / self.experiment_name / self.trial_name

    @property
    def offline(self) -> bool:
        """True if the trainer learns from dataset rows only, without servers or services."""
        return not parse_allocation(self.allocation_mode).inference_replicas

    @property
    def namespace(self) -> str:
        """The run's name, `experiment_name/trial_name`.

        It is used in Redis keys, NATS subjects, logs and traces.
        """
        return f"{self.experiment_name}/{self.trial_name}"

    @property
    def setup_timeout_s(self) -> float:
        """Deadline of what loads the model: `rollout.setup_timeout_s`, or that of the device."""
        chosen = self.rollout.setup_timeout_s
        return chosen or (GPU_SETUP_S if self.stack.gpus_per_node else CPU_SETUP_S)

    @property
    def tokenizer_dir(self) -> Path:
        """The model's folder, which contains tokenizer.json."""
        return Path(self.model.path)


@dataclass
class GRPOConfig(BaseExperimentConfig):
    """The whole configuration of an experiment, for every algorithm and for offline training."""

    algorithm: Algorithm = "grpo"
    """Sets the keys listed in docs/algorithms.md; a key that you set yourself takes precedence."""
    total_train_steps: Annotated[int, Ge(1)] = 100
    """Number of train steps of the run."""
    train_dataset: DatasetConfig = field(default_factory=DatasetConfig)
    gconfig: GenerationHyperparameters = field(default_factory=GenerationHyperparameters)
    actor: PPOActorConfig = field(default_factory=PPOActorConfig)
    ref: RefConfig | None = None
    """A frozen reference model for the KL term (`FSDPPPOActor(config.ref)`); null turns it off."""
    critic: CriticConfig | None = None
    """A value model (`FSDPPPOCritic(config.critic)`); `algorithm: ppo` sets it. If it is null,
    there is no critic."""


ConfigT = TypeVar("ConfigT", bound=BaseExperimentConfig)


def known_keys(schema: type) -> list[str]:
    """Return all dotted keys of a config dataclass, sections included."""
    return list(_types_of_keys(schema))


@cache
def _types_of_keys(schema: type) -> dict[str, Any]:
    """The type of each dotted key, sections included."""
    types: dict[str, Any] = {}
    hints = get_type_hints(schema)
    for item in fields(schema):
        if item.metadata.get("omegaconf_ignore"):
            continue
        types[item.name] = hints[item.name]
        for option in (hints[item.name], *get_args(hints[item.name])):
            if is_dataclass(option):
                inner = _types_of_keys(cast("type", option))
                types |= {f"{item.name}.{sub}": kind for sub, kind in inner.items()}
    return types


_NULL = re.compile(r"Incompatible value 'None'|field '.*' is not Optional")
_CHOICE = re.compile(r"Invalid value '(.*)', expected one of (\[.*\])")


def _explain(error: Exception, schema: type, source: str) -> ConfigError:
    """Turns OmegaConf's error into one line with a nearest-name hint."""
    key = str(getattr(error, "full_key", "") or "")
    first = str(getattr(error, "msg", "") or error).split("\n", maxsplit=1)[0].strip()
    keys = known_keys(schema)
    plain = key.partition("[")[0]  # without the index of a list's item
    if plain and plain not in keys:
        if moved := hint_for(key):
            return ConfigError(f"{source}: unknown key {key!r}: {moved}")
        hint = did_you_mean(key, keys)
        if not hint:  # the right leaf in the wrong section
            leaf = key.rsplit(".", maxsplit=1)[-1]
            same = [k for k in keys if k.rsplit(".", maxsplit=1)[-1] == leaf]
            hint = f"; did you mean {same[0]!r}?" if same else ""
        return ConfigError(redact(f"{source}: unknown key {key!r}{hint}"))
    if match := _CHOICE.fullmatch(first):
        choices = [str(choice) for choice in ast.literal_eval(match[2])]
        expected = f"expected one of {', '.join(choices)}{did_you_mean(match[1], choices)}"
        return ConfigError(redact(f"{source}: {key} {match[1]!r}: {expected}"))
    if _NULL.match(first):
        return ConfigError(redact(f"{source}: {key} null: expected a value"))
    return ConfigError(redact(f"{source}: {key + ': ' if key else ''}{first}"))


def _left_open(value: Any, key: str) -> str:
    """Returns the first key whose value is OmegaConf's mark of one to be set; "" if none."""
    if isinstance(value, dict):
        inner = (_left_open(value[name], f"{key}.{name}".removeprefix(".")) for name in value)
        return next((each for each in inner if each), "")
    return key if value == "???" else ""


def _misplaced(part: DictConfig, schema: type) -> str:
    """Returns what a part has in place of a section or of a list; "" if nothing."""
    types = _types_of_keys(schema)

    def find(node: Any, key: str) -> str:
        kinds = [kind for kind in (types.get(key), *get_args(types.get(key))) if kind]
        if any(is_dataclass(kind) for kind in kinds) or not key:
            if isinstance(node, dict):
                inner = (find(node[name], f"{key}.{name}".removeprefix(".")) for name in node)
                return next((each for each in inner if each), "")
            return "" if node is None else f"{key}: expected a section (keys with values)"
        wanted = any(get_origin(kind) is list for kind in kinds)
        return f"{key}: expected a list" if wanted and not isinstance(node, list) else ""

    return find(OmegaConf.to_container(part), "")


def _merge(base: DictConfig, extra: DictConfig, schema: type, source: str) -> DictConfig:
    try:
        return cast("DictConfig", OmegaConf.merge(base, extra))
    except (OmegaConfBaseException, ValueError, TypeError) as error:
        if misplaced := _misplaced(extra, schema):
            raise ConfigError(f"{source}: {misplaced}") from None
        raise _explain(error, schema, source) from None


def _as_text(source: str) -> Any:
    """Returns YAML with every value as its text."""
    return yaml.load(source, yaml.BaseLoader)  # noqa: S506 - it makes text, lists and mappings only


def _keep_text(part: DictConfig, written: Any, schema: type) -> None:
    """Puts back what was written for text that YAML reads as a number: 007 is a name.

    Args:
        part: What YAML and OmegaConf made of it.
        written: The same with every value as its text.
        schema: Its keys.
    """
    for key, kind in _types_of_keys(schema).items():
        if str not in (kind, *get_args(kind)):
            continue
        value, text = OmegaConf.select(part, key, throw_on_resolution_failure=False), written
        for name in key.split("."):
            text = text.get(name) if isinstance(text, dict) else None
        if isinstance(value, bool | int | float) and isinstance(text, str):
            OmegaConf.update(part, key, text)


def _read_yaml(path: Path, schema: type) -> DictConfig:
    if not path.is_file():
        found = "is not a file" if path.exists() else "does not exist"
        raise ConfigError(f"config file {str(path)!r} {found}")
    try:
        loaded = OmegaConf.load(path)
        if isinstance(loaded, DictConfig):
            _keep_text(loaded, _as_text(path.read_text("utf-8-sig")), schema)
    except Exception as error:  # yaml and OmegaConf raise unrelated classes
        line = " ".join(str(error).split())
        raise ConfigError(f"config file {str(path)!r}: not YAML: {line}") from None
    if not isinstance(loaded, DictConfig):
        raise ConfigError(f"config file {str(path)!r}: expected a mapping at the top level")
    return loaded


def build_config(
    schema: type[ConfigT], file: Path | None, overrides: list[str] | None = None
) -> ConfigT:
    """Defaults, then the file, then `key=value` overrides; strict about unknown keys.

    Raises:
        ConfigError: One line naming the key, the value and what was expected.
    """
    parts = [] if file is None else [(_read_yaml(file, schema), str(file))]
    return _resolve(schema, parts + [_read_override(each, schema) for each in overrides or []])


def _read_override(override: str, schema: type) -> tuple[DictConfig, str]:
    key, equals, text = override.partition("=")
    if not equals or not key.strip(".") or override.startswith("-"):
        raise ConfigError(f"override {override!r}: expected key=value")
    source = f"override {override!r}"
    try:
        part = OmegaConf.from_dotlist([override])
        written = _as_text(text)
        for name in reversed(key.split(".")):
            written = {name: written}
        _keep_text(part, written, schema)
    except Exception as error:  # the dotlist parser raises many classes
        first = str(error).splitlines()[0]
        raise ConfigError(f"{source}: expected YAML after '=': {first}") from None
    return part, source


def _resolve(schema: type[ConfigT], parts: list[tuple[DictConfig, str]]) -> ConfigT:
    """Defaults, the algorithm's preset, then each part over what is there."""

    def merged(config: DictConfig) -> DictConfig:
        try:  # each merge copies the whole configuration, so all in one
            return cast("DictConfig", OmegaConf.merge(config, *(part for part, _ in parts)))
        except (OmegaConfBaseException, ValueError, TypeError):
            for part, source in parts:  # the error names the part
                config = _merge(config, part, schema, source)
            return config

    for part, source in parts:
        if key := _left_open(OmegaConf.to_container(part), ""):
            raise ConfigError(f"{source}: {key} '???': expected a value")
    result = merged(base := _defaults(cast("Any", schema)))
    if issubclass(schema, GRPOConfig):
        chosen = preset(result.algorithm, result.gconfig.max_new_tokens)
        if any(chosen.values()) or "critic" in chosen:
            result = merged(cast("DictConfig", OmegaConf.merge(base, chosen)))
    try:
        config = cast("ConfigT", OmegaConf.to_object(result))
    except (OmegaConfBaseException, RecursionError) as error:  # ${…}
        raise _explain(error, schema, ", ".join(source for _, source in parts)) from None
    validate(config)
    return config


@cache
def _defaults(schema: Any) -> DictConfig:
    """A schema's defaults, which are only read: a merge copies them."""
    return cast("DictConfig", OmegaConf.structured(schema))


_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]*(/[\w.=+-]+)*/?")
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


def validate(config: BaseExperimentConfig) -> None:
    """Checks what OmegaConf does not; raises ConfigError."""
    check(config)
    for key in ("experiment_name", "trial_name"):
        if not _NAME.fullmatch(getattr(config, key)):
            raise ConfigError(
                f"{key} {getattr(config, key)!r}: expected at most 63 lower-case letters, digits "
                "and dashes, no dash at an end"
            )
    allocation = parse_allocation(config.allocation_mode)
    layout = allocation.layout
    joined = TRANSPORTS[config.weight_sync.transport].process_group
    if allocation.sharing.together and joined:
        apart = [name for name, each in TRANSPORTS.items() if not each.process_group]
        raise ConfigError(
            f"weight_sync.transport {config.weight_sync.transport!r}: expected "
            f"{' or '.join(apart)} with allocation_mode "
            f"{config.allocation_mode!r}, because two ranks of a group cannot have one GPU"
        )
    for entry in config.endpoints.inference:
        parse_source(entry)
    _check_weights_path(config.weight_sync)
    if joined and config.weight_sync.max_unavailable:
        raise ConfigError(
            f"weight_sync.max_unavailable {config.weight_sync.max_unavailable}: expected 0 with "
            f"transport {config.weight_sync.transport}, which reaches all servers at once"
        )
    if isinstance(config, GRPOConfig):
        _complete(config)
        config.actor.check_optimizer()
        if config.actor.kernels == "compile":
            layout.check_compiled()
        for engine in (config.actor, config.ref):
            if engine is not None:
                # Plain shares fit any number of ranks: a run may resume on fewer.
                engine.layout = "" if layout.plain else str(layout)


def _check_weights_path(own: WeightSyncSection) -> None:
    path, url, rest = own.path.partition("://")
    if url and not (in_object_store(own.path) and _BUCKET.fullmatch(rest)):
        raise ConfigError(  # only the start of the value, which may contain a password
            f"weight_sync.path {path[:20]}://…: expected a folder or {{s3,gs,az}}://bucket/prefix; "
            "credentials come from the environment"
        )
    if url and own.encoding == "delta":
        raise ConfigError(
            f"weight_sync.encoding 'delta': expected full with weight_sync.path {path}://{rest}: "
            "an object store cannot rebuild the full file from deltas"
        )


def _complete(config: GRPOConfig) -> None:
    """Checks keys across sections, and passes engines the values that they have no key for."""
    gconfig, overlong = config.gconfig, config.actor.overlong_tokens
    if gconfig.temperature <= 0:
        raise ConfigError(
            f"gconfig.temperature {gconfig.temperature}: expected a temperature > 0, because "
            "greedy answers have no sampling probability to train on (pass an evaluation its own "
            "GenerationHyperparameters)"
        )
    if gconfig.top_k < 1 and gconfig.top_k != -1:
        raise ConfigError(f"gconfig.top_k {gconfig.top_k}: expected 1 or more, or -1 for all")
    if overlong > gconfig.max_new_tokens:
        raise ConfigError(
            f"actor.overlong_tokens {overlong}: expected 0 to {gconfig.max_new_tokens} "
            "(gconfig.max_new_tokens)"
        )
    check_constants(config.actor.loss_type, config.actor.loss_constants)
    if config.actor.behavior_weight_mode == "second_moment":
        cap = config.actor.behavior_weight_cap
        if not config.actor.decoupled:
            raise ConfigError(
                "actor.behavior_weight_mode second_moment: expected actor.prox_logp_method "
                f"recompute or loglinear, not {config.actor.prox_logp_method}, which has no "
                "behavior weight"
            )
        if cap is None or cap > 1:  # 5, the default, bounds a weight, not its squared log
            raise ConfigError(
                f"actor.behavior_weight_cap {'null' if cap is None else cap}: expected at most 1 "
                "with actor.behavior_weight_mode second_moment, such as 0.04 (M2PO)"
            )
    if config.critic is not None and config.actor.optimizer is None:
        raise ConfigError(
            "actor.optimizer null: expected an optimizer, because the critic uses its settings too"
        )
    if config.critic is None and config.actor.gae_lambda != 1:
        raise ConfigError(
            f"actor.gae_lambda {config.actor.gae_lambda}: expected 1 without a critic "
            "(algorithm=ppo or critic={} gives one)"
        )
    config.actor.critic = config.critic is not None
    config.actor.max_response_tokens = gconfig.max_new_tokens
    config.actor.largest_micro_batch = micro_batch_tokens(config)
    config.actor.reference = config.ref
    chosen = config.rollout.setup_timeout_s
    least = _COLLECTIVE_S + (GPU_SETUP_S if config.stack.gpus_per_node else 0)
    config.actor.distributed_timeout_seconds = 5 * chosen if chosen else least


def micro_batch_tokens(config: GRPOConfig) -> int:
    """Returns the largest number of tokens that a micro-batch can have."""
    longest = config.model.context_length
    shares = parse_allocation(config.allocation_mode).layout.data
    sequences = -(-config.train_dataset.batch_size // shares) * config.gconfig.n_samples
    return min(max(config.actor.mb_spec.max_tokens_per_mb, longest), sequences * longest)


def keys_with_secrets(config: BaseExperimentConfig) -> list[str]:
    """Returns the keys whose values are URLs with a password or a token in them."""

    def find(value: object, key: str) -> list[str]:
        if isinstance(value, dict):
            return [each for name in value for each in find(value[name], f"{key}.{name}")]
        if isinstance(value, list):
            return [key] if any(find(each, key) for each in value) else []
        hidden = isinstance(value, str) and redact(value) != value
        return [key.removeprefix(".")] if hidden else []

    return find(OmegaConf.to_container(OmegaConf.structured(config)), "")


def cautions(config: BaseExperimentConfig) -> list[str]:
    """Returns warnings about settings that are allowed but may not be intended, one line each."""
    secret = [
        f"{key}: holds a secret, and is in config.yaml and in what people copy from it; write it "
        "into a file of security.dir instead"
        for key in keys_with_secrets(config)
    ]
    if not isinstance(config, GRPOConfig):
        return secret
    gconfig = config.gconfig
    limits = [f"top_p {gconfig.top_p}"] if gconfig.top_p < 1 else []
    limits += [f"top_k {gconfig.top_k}"] if gconfig.top_k > 0 else []
    truncated = [
        f"gconfig.{limit}: answers are sampled from a truncated distribution, but logprobs are "
        "those of the whole distribution, so importance weights ignore the truncation; "
        "expected top_p=1 and top_k=-1"
        for limit in limits
    ]
    return [*secret, *truncated, *map(str, of_config(config))]


def load_expr_config(argv: list[str], schema: type[ConfigT]) -> tuple[ConfigT, str]:
    """Returns the experiment's configuration from a recipe's command line.

    Args:
        argv: The arguments, without the program's name: `[--config FILE] [key=value ...]`.
        schema: The class of the configuration: `GRPOConfig`, or a subclass that adds the recipe's
            own fields.

    Returns:
        A tuple: the configuration, and the file's path ("" if no file is given). An argument
        `key=value` overrides the file, which overrides the defaults.

    Raises:
        ConfigError: The file cannot be read, or a key or value is wrong. The message names the key
            and the value, and says what was expected.
    """
    arguments = list(argv)
    file = ""
    if "--config" in arguments:
        at = arguments.index("--config")
        if at + 1 >= len(arguments):
            raise ConfigError("--config: expected a file name")
        file = arguments[at + 1]
        del arguments[at : at + 2]
    return build_config(schema, Path(file) if file else None, arguments), file


def load_service_config(file: Path, overrides: list[str] | None = None) -> GRPOConfig:
    """Load the experiment file for a service, which ignores the recipe's own top-level keys."""
    loaded = _read_yaml(file, GRPOConfig)
    known = {item.name for item in fields(GRPOConfig)}
    for key in [k for k in loaded if k not in known]:
        del loaded[key]
    parts = [(loaded, str(file)), *(_read_override(each, GRPOConfig) for each in overrides or [])]
    return _resolve(GRPOConfig, parts)


def as_yaml(config: BaseExperimentConfig) -> str:
    """Return the resolved experiment file."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def save_config(config: BaseExperimentConfig, file: Path) -> None:
    """Writes the resolved experiment file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(as_yaml(config), encoding="utf-8")
