"""AReaL's experiment files, converted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf
from typer.testing import CliRunner

from areal.config.experiment import GRPOConfig, build_config
from areal.errors import ConfigError
from areal_launch.cli import app
from areal_launch.commands.from_areal import Converted, convert, converted_yaml

# As AReaL 1.0 has them; `${...}` as in its own files.
THEIRS = """
experiment_name: GSM8K_grpo
trial_name: trial0
total_train_epochs: 10
tokenizer_path: ${actor.path}
cluster: {n_nodes: 1, n_gpus_per_node: 8, fileroot: /nfs/runs}
rollout: {backend: "sglang:d4p1t1", max_concurrent_rollouts: 128, max_head_offpolicyness: 2}
gconfig: {n_samples: 4, max_new_tokens: 1024, top_k: 100000000, greedy: false}
actor:
  backend: "fsdp:d2p1t2"
  path: Qwen/Qwen2.5-1.5B-Instruct
  dtype: bfloat16
  optimizer: {type: adam, lr: 1.7e-5, beta1: 0.9}
  eps_clip: 0.4
  kl_ctl: 0.0
  reward_bias: -0.5
  recompute_logprob: true
  use_decoupled_loss: true
  rejection_sampling: {level: token, action: mask, upper: 4.0}
  reward_norm: {mean_level: group, std_level: group, group_size: "${gconfig.n_samples}"}
  weight_update_mode: xccl
ref: {path: "${actor.path}", offload: true}
sglang: {dtype: bfloat16, context_length: 8192, mem_fraction_static: 0.8}
train_dataset: {path: openai/gsm8k, batch_size: 256, shuffle: true}
recover: {mode: disabled, freq_steps: 5}
stats_logger: {wandb: {mode: online}}
heldout: 12
"""


def converted(text: str) -> Converted:
    theirs = OmegaConf.to_container(OmegaConf.create(text), resolve=True)
    assert isinstance(theirs, dict)
    return convert(theirs)


def keys_of(text: str) -> dict[str, Any]:
    return converted(text).keys


def test_file_when_converted_then_ours_reads_it_with_their_numbers(tmp_path: Path) -> None:
    theirs, ours = tmp_path / "theirs.yaml", tmp_path / "ours.yaml"
    theirs.write_text(THEIRS)
    text = converted_yaml(theirs)
    ours.write_text(text.replace("heldout: 12\n", ""))  # the recipe's own config class has it
    config = build_config(GRPOConfig, ours)
    assert (config.experiment_name, config.run_root) == ("gsm8k-grpo", "/nfs/runs")
    assert config.allocation_mode == "sglang:d4+fsdp:d2t2"
    assert (config.model.path, config.model.context_length) == ("Qwen/Qwen2.5-1.5B-Instruct", 8192)
    assert (config.gconfig.n_samples, config.gconfig.top_k) == (4, -1)
    assert config.rollout.max_head_offpolicyness == 2
    actor = config.actor
    assert (actor.eps_clip, actor.kl_ctl, actor.behavior_weight_cap) == (0.4, 0.0, 4.0)
    assert (actor.reward_norm, actor.adv_norm) == ("group/group", None)
    assert actor.prox_logp_method == "recompute"
    assert actor.optimizer is not None
    assert (actor.optimizer.lr, actor.optimizer.weight_decay) == (1.7e-5, 0.01)
    assert actor.ppo_n_minibatches == 4, "their default, which is not ours"
    assert config.ref is not None
    assert (config.ref.path, config.ref.offload) == ("Qwen/Qwen2.5-1.5B-Instruct", True)
    assert config.weight_sync.transport == "distributed"
    assert config.checkpoint.freq_steps == 5
    assert config.stack.inference_command.endswith("--mem-fraction-static 0.8")
    comments = [line for line in text.splitlines() if line.startswith("#")]
    for said in (
        "experiment_name 'GSM8K_grpo': is now 'gsm8k-grpo'",
        "reward_bias -0.5: the reward function adds it",
        "total_train_epochs: `total_train_steps`",
        "stats_logger: `metrics.jsonl`",
        "heldout: not a key of AReaL",
    ):
        assert any(said in line for line in comments), said


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("sglang.d12p1t1+d4p1t1", "sglang:d12+fsdp:d4"),  # AReaLite
        ("sglang:d2t4+fsdp:d4c2", "sglang:d2t4+fsdp:d4c2"),
        ("vllm:d1+megatron:d4e2", "sglang:d1+fsdp:d4e2"),
        ("sglang:d1+megatron:d2p4t2", "sglang:d1+fsdp:d2t2"),
        ("sglang:d2|fsdp:d2", "sglang:d2|fsdp:d2"),
        ("sglang.d2p1t1|d2p1t1", "sglang:d2|fsdp:d2"),
    ],
)
def test_allocation_when_converted_then_the_layout_stays(theirs: str, ours: str) -> None:
    assert keys_of(f"allocation_mode: {theirs}")["allocation_mode"] == ours


@pytest.mark.parametrize(
    ("theirs", "method"),
    [
        ("{use_decoupled_loss: true, prox_logp_method: loglinear}", "loglinear"),
        ("{use_decoupled_loss: true}", "recompute"),
        ("{use_decoupled_loss: false, recompute_logprob: true}", "unweighted"),
        ("{}", "behavior"),
    ],
)
def test_ratio_when_converted_then_it_is_around_the_same_policy(theirs: str, method: str) -> None:
    assert keys_of(f"actor: {theirs}")["actor.prox_logp_method"] == method


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("{mean_level: group, std_level: null}", "group/none"),
        ("{mean_level: group, mean_leave1out: true, std_level: null}", "leave1out/none"),
        ("{}", "batch/batch"),
        ("null", None),
    ],
)
def test_norm_when_converted_then_mean_and_std_are_two_words(theirs: str, ours: str | None) -> None:
    assert keys_of(f"actor: {{reward_norm: {theirs}}}")["actor.reward_norm"] == ours


@pytest.mark.parametrize("level", ["mean_level: group", "mean_level: null, std_level: group"])
def test_advantage_norm_when_it_is_not_over_the_batch_then_a_comment_says_so(level: str) -> None:
    found = converted(f"actor: {{adv_norm: {{{level}}}}}")
    assert found.keys["actor.adv_norm"] is None
    assert "actor.adv_norm" in str(found.notes)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("{use_lora: true}", {"rank": 32, "alpha": 16, "targets": []}),
        (
            "{use_lora: true, lora_rank: 8, lora_alpha: 8, target_modules: [q_proj]}",
            {"rank": 8, "alpha": 8, "targets": ["q_proj"]},
        ),
        ("{use_lora: false, lora_rank: 8}", {}),
    ],
)
def test_lora_when_converted_then_the_section_is_there_only_if_it_is_on(
    theirs: str, ours: dict[str, Any]
) -> None:
    found = {key: value for key, value in keys_of(f"actor: {theirs}").items() if "lora" in key}
    assert found == {f"actor.lora.{key}": value for key, value in ours.items()}


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("{action: clamp, upper: 2}", ("token_truncate", 2.0)),
        ("{level: token, action: mask}", ("token_mask", 5.0)),
        ("{level: sequence, action: mask}", ("token_mask", None)),  # AReaL's is a geometric mean
        ("{metric: kl_k2, upper: 0.5}", ("token_mask", None)),
    ],
)
def test_rejection_when_converted_then_large_weights_are_treated_alike_or_it_is_said(
    theirs: str, ours: tuple[str, float | None]
) -> None:
    found = converted(f"actor: {{rejection_sampling: {theirs}}}")
    keys = [f"actor.behavior_weight_{name}" for name in ("mode", "cap")]
    assert tuple(found.keys.get(key) for key in keys) == ours
    assert bool(found.notes) == (ours[1] is None)


@pytest.mark.parametrize(
    ("theirs", "key", "ours"),
    [
        ("actor: {overlong_tokens: 512}", "actor.overlong_tokens", None),
        (
            "actor: {overlong_reward_penalty: true, overlong_tokens: 512}",
            "actor.overlong_tokens",
            512,
        ),
        ("actor: {behav_imp_weight_cap: null}", "actor.behavior_weight_cap", None),
        ("actor: {use_cispo_loss: true}", "actor.loss_type", "cispo"),
        ("actor: {use_lora: true, target_modules: all-linear}", "actor.lora.targets", []),
        ("actor: {use_lora: true, target_modules: null}", "actor.lora.targets", []),
        (
            'allocation_mode: ""\nrollout: {backend: "sglang:d1"}\nactor: {backend: "fsdp:d2"}',
            "allocation_mode",
            "sglang:d1+fsdp:d2",
        ),
    ],
)
def test_switch_when_it_is_on_or_off_then_it_stays_so(theirs: str, key: str, ours: Any) -> None:
    assert converted(theirs).keys.get(key) == ours


def test_null_when_it_is_a_choice_then_it_is_written() -> None:
    assert "actor.behavior_weight_cap" in converted("actor: {behav_imp_weight_cap: null}").keys


@pytest.mark.parametrize("theirs", ['{backend: "fsdp:d2"}', "{backend: null}"])
def test_backend_when_it_is_alone_then_a_comment_says_so(theirs: str) -> None:
    found = converted(f"actor: {theirs}")
    assert "allocation_mode" not in found.keys
    assert bool(found.notes) == ("fsdp" in theirs)


def test_pipeline_when_it_is_asked_for_then_the_comment_says_that_there_is_none() -> None:
    notes = convert({"allocation_mode": "vllm:d1+megatron:d2p4"}).notes
    assert notes == {
        "here it is sglang": ["rollout.backend vllm"],
        "here it is fsdp": ["actor.backend megatron"],
        "no pipeline parallelism here; its ranks are left out": ["actor p4"],
    }


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- a", "expected a mapping"),
        ("a: [", "expected"),
        ("allocation_mode: lots", "allocation_mode 'lots': expected e.g."),
        ("a: ${nowhere}", "nowhere"),
    ],
)
def test_file_when_it_is_bad_then_one_line_says_so(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "theirs.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        converted_yaml(file)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="No such file"):
        converted_yaml(tmp_path / "none.yaml")


@pytest.mark.parametrize("beside", [["seed=3"], ["my_recipe"], ["--config", "mine.yaml"]])
def test_file_when_something_else_is_given_too_then_it_is_refused(
    tmp_path: Path, beside: list[str]
) -> None:
    file = tmp_path / "theirs.yaml"
    file.write_text(THEIRS)
    answer = CliRunner().invoke(app, ["config", "--from-areal", str(file), *beside])
    assert answer.exit_code == 2
    assert f"expected no '{beside[-1]}' with it" in answer.output


def test_result_when_a_value_cannot_be_then_the_first_comment_names_it(tmp_path: Path) -> None:
    file = tmp_path / "theirs.yaml"
    file.write_text("actor: {eps_clip: 3.0}")
    text = converted_yaml(file)
    assert "# To fix: actor.eps_clip 3.0" in text
    assert yaml.safe_load(text)["actor"]["eps_clip"] == 3.0
