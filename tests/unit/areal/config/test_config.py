from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

from areal.config.allocation import parse_allocation
from areal.config.experiment import (
    GRPOConfig,
    build_config,
    cautions,
    load_expr_config,
    load_service_config,
    save_config,
)
from areal.errors import ConfigError


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "experiment.yaml"
    file.write_text(text)
    return file


def test_build_config_when_file_and_override_then_override_wins(tmp_path):
    file = write(tmp_path, "seed: 3\nrollout: {max_head_offpolicyness: 4}\n")
    config = build_config(GRPOConfig, file, ["rollout.max_head_offpolicyness=0"])
    assert config.seed == 3
    assert config.rollout.max_head_offpolicyness == 0
    assert config.train_dataset.batch_size == 64


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("rollout.max_head_offpolicynes=1", ["rollout.max_head_offpolicynes", "did you mean"]),
        ("max_head_offpolicyness=1", ["'max_head_offpolicyness'", "rollout.max_head_offpoli"]),
        ("seed=abc", ["seed", "abc"]),
        ("trial_name=Not_OK", ["trial_name", "Not_OK", "lower-case"]),
        ("allocation_mode=d2", ["allocation_mode", "d2", "expected"]),
        ("allocation_mode=sglang:d2+fsdp:d1p2", ["parallelism"]),
        ("weight_sync.interrupt=maybe", ["weight_sync.interrupt", "maybe", "in_place"]),
        ("rollout.max_head_offpolicyness=-1", ["max_head_offpolicyness", "-1", "0 or more"]),
        ("actor.eps_clip=7", ["actor.eps_clip 7.0", "1 or less"]),
        (
            "ref.optimizer.lr=1e-5",
            ["ref.optimizer", "ref is frozen and uses the settings of actor"],
        ),
        ("ref={path: x, optimizer: {lr: 1e-5}}", ["ref.optimizer", "ref is frozen"]),
        ("ref.gradient_checkpointing=true", ["ref.gradient_checkpointing", "ref is frozen"]),
        ("gconfig.temperature=0", ["gconfig.temperature 0.0", "temperature > 0", "evaluation"]),
        ("gconfig.greedy=true", ["'gconfig.greedy'", "temperature 0"]),
        ("actor.temperature=0.6", ["unknown key 'actor.temperature'", "use gconfig.temperature"]),
        ("actor.use_decoupled_loss=false", ["use actor.prox_logp_method=unweighted"]),
        ("actor.mb_spec.n_mbs=4", ["actor.mb_spec.n_mbs", "one value for all runs"]),
        ("actor.reward_norm.mean_level=group", ["actor.reward_norm", "group/group, group/batch"]),
        ("algorithm=gpro", ["algorithm 'gpro'", "dr_grpo", "did you mean 'grpo'?"]),
        ("algorithm=reinforce++", ["algorithm 'reinforce++'", "did you mean 'reinforce'?"]),
        ("oops", ["override 'oops'", "key=value"]),
    ],
)
def test_build_config_when_wrong_then_one_line_names_key_and_expectation(override, words):
    with pytest.raises(ConfigError) as caught:
        build_config(GRPOConfig, None, [override])
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_cautions_when_sampling_is_truncated_then_one_line_each_and_else_none():
    assert cautions(GRPOConfig()) == []
    config = build_config(
        GRPOConfig, None, ["gconfig.top_p=0.9", "gconfig.top_k=50", "gconfig.n_samples=2"]
    )
    first, second = cautions(config)
    assert first.startswith("gconfig.top_p 0.9: ")
    assert second.startswith("gconfig.top_k 50: ")
    for line in (first, second):
        assert "importance weights ignore" in line
        assert "\n" not in line


def test_build_config_when_file_is_missing_or_not_yaml_then_names_it(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        build_config(GRPOConfig, tmp_path / "absent.yaml")
    with pytest.raises(ConfigError, match="not YAML"):
        build_config(GRPOConfig, write(tmp_path, "a: [1,\nb: }"))
    with pytest.raises(ConfigError, match="mapping"):
        build_config(GRPOConfig, write(tmp_path, "- 1\n- 2\n"))


@dataclass
class RecipeConfig(GRPOConfig):
    control: bool = False


def test_recipe_config_when_service_reads_it_then_own_keys_are_ignored(tmp_path):
    file = tmp_path / "config.yaml"
    save_config(build_config(RecipeConfig, None, ["control=true", "seed=5"]), file)
    recipe_view, name = load_expr_config(["--config", str(file)], RecipeConfig)
    assert recipe_view.control
    assert name == str(file)
    assert load_service_config(file).seed == 5
    with pytest.raises(ConfigError, match="unknown key 'control'"):
        build_config(GRPOConfig, file)


@pytest.mark.parametrize(
    ("text", "inference", "ranks"),
    [
        ("sglang:d2+fsdp:d1", 2, 1),
        ("sglang.d12p1t1+d4p1t1", 12, 4),
        ("sglang:d4t2+fsdp:d2", 4, 2),
        ("sglang:d4+fsdp:d8t2c2e4", 4, 32),
        ("sglang:d4+fsdp:d16s8", 4, 16),
    ],
)
def test_parse_allocation_when_valid_then_counts(text, inference, ranks):
    allocation = parse_allocation(text)
    assert (allocation.inference_replicas, allocation.trainer_ranks) == (inference, ranks)


def test_config_when_one_was_changed_by_its_reader_then_the_next_has_the_defaults() -> None:
    """The defaults are made once in a process."""
    first = build_config(GRPOConfig, None, ["critic={}"])
    expected = asdict(build_config(GRPOConfig, None))
    first.gconfig.max_new_tokens += 1
    first.endpoints.inference.append("http://127.0.0.1:1")
    first.actor.loss_constants["changed"] = 1.0
    assert asdict(build_config(GRPOConfig, None)) == expected


@pytest.mark.parametrize("algorithm", ["grpo", "dapo"])
@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_override_when_one_of_several_is_wrong_then_it_is_named(algorithm: str, wrong: int) -> None:
    overrides = [f"algorithm={algorithm}", "seed=7", "trial_name=b"]
    overrides[wrong] = "gconfig.max_new_tokens=many"
    with pytest.raises(ConfigError, match=r"^override 'gconfig.max_new_tokens=many': "):
        build_config(GRPOConfig, None, overrides)
