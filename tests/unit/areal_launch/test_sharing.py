"""One GPU trains and serves: what fits, how, and what a server is told."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.areal_launch.gpu_machines import install

from areal.config.allocation import Sharing, parse_allocation
from areal.config.experiment import GRPOConfig, build_config
from areal.errors import CannotStart, ConfigError
from areal.memory_estimate import GIB, SURELY, ModelShape
from areal_launch.clusters.base import Cluster, assign
from areal_launch.doctor import memory
from areal_launch.doctor.auto import choose
from areal_launch.doctor.gpus import judge, look
from areal_launch.doctor.local import examine_here
from areal_launch.doctor.settle import settle_here
from areal_launch.doctor.sharing import ASLEEP, Split, split
from areal_launch.processes.process import Node
from areal_launch.run_folder import RunFolder
from areal_launch.stack.plan import plan_stack
from areal_rollout.config import RolloutConfig
from areal_weight_sync.config import WeightSyncConfig

# Layers, hidden, feed-forward, heads, key and value heads, tied.
QWEN2_5 = {
    "0.5B": (24, 896, 4864, 14, 2, True),
    "1.5B": (28, 1536, 8960, 12, 2, True),
    "3B": (36, 2048, 11008, 16, 2, True),
    "7B": (28, 3584, 18944, 28, 4, False),
    "32B": (64, 5120, 27648, 40, 8, False),
    "72B": (80, 8192, 29568, 64, 8, False),
}


def write_model(folder: Path, size: str) -> Path:
    layers, hidden, between, heads, kv, tied = QWEN2_5[size]
    content = {
        "model_type": "qwen2",
        "hidden_size": hidden,
        "intermediate_size": between,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": 151936,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
    }
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def shape_of(folder: Path, size: str) -> ModelShape:
    return ModelShape.read(write_model(folder / size, size))


def make(allocation: str, *overrides: str, gpus: int = 1) -> GRPOConfig:
    said = [f"allocation_mode={allocation}", f"stack.gpus_per_node={gpus}"]
    batch = ["train_dataset.batch_size=64", "gconfig.n_samples=8"]
    return build_config(GRPOConfig, None, [*said, *batch, *overrides])


# ------------------------------------------------------------------ one GPU


@pytest.mark.parametrize(
    ("size", "gib", "how"),
    [
        ("0.5B", 24, "shared"),
        ("0.5B", 80, "shared"),
        ("1.5B", 24, ""),
        ("1.5B", 40, "alternating"),
        ("1.5B", 48, "shared"),
        ("1.5B", 80, "shared"),
        ("3B", 48, ""),
        ("3B", 70, "alternating"),
        ("3B", 80, "shared"),
        ("7B", 80, ""),
        ("7B", 180, "alternating"),
        ("7B", 280, "shared"),
    ],
)
def test_split_when_one_gpu_has_so_much_memory_then_shared_or_turns_or_one_line(
    tmp_path: Path, size: str, gib: int, how: str
) -> None:
    config, shape = make("sglang:d1|fsdp:d1"), shape_of(tmp_path, size)
    if not how:
        with pytest.raises(CannotStart, match=r"the trainer alone needs .*actor\.offload=true"):
            split(config, shape, gib * GIB)
        return
    found = split(config, shape, gib * GIB)
    assert found.sharing == how
    assert "\n" not in found.why


def test_split_when_shared_is_asked_for_and_does_not_fit_then_names_the_turns(
    tmp_path: Path,
) -> None:
    config = make("sglang:d1|fsdp:d1@shared")
    with pytest.raises(CannotStart) as refused:
        split(config, shape_of(tmp_path, "7B"), 180 * GIB)
    said = str(refused.value)
    assert "both do not fit at once" in said
    assert "allocation_mode='sglang:d1|fsdp:d1@alternating'" in said
    assert "actor.offload=true" in said
    assert "\n" not in said


def test_split_when_turns_are_asked_for_then_they_are_taken_where_both_would_fit(
    tmp_path: Path,
) -> None:
    config = make("sglang:d1|fsdp:d1@alternating")
    assert split(config, shape_of(tmp_path, "0.5B"), 80 * GIB).sharing is Sharing.ALTERNATING


@settings(deadline=None, max_examples=60)
@given(
    layers=st.integers(1, 80),
    hidden=st.sampled_from([256, 1024, 4096, 8192]),
    gib=st.integers(6, 300),
    running=st.integers(1, 256),
    context=st.sampled_from([512, 4096, 32768]),
)
def test_split_when_it_is_any_model_then_nobody_gets_what_another_needs(
    layers: int, hidden: int, gib: int, running: int, context: int
) -> None:
    layer = 12 * hidden * hidden
    shape = ModelShape(
        parameters=layers * layer + 2 * 32000 * hidden,
        layer_parameters=layer,
        layers=layers,
        hidden=hidden,
        heads=hidden // 64,
        kv_heads=max(1, hidden // 512),
        head_dim=64,
        intermediate=3 * hidden,
        vocabulary=32000,
    )
    config = make(
        "sglang:d1|fsdp:d1",
        f"stack.inference_max_running={running}",
        f"model.context_length={context}",
    )
    free, said = gib * GIB, ""
    found: Split | None
    try:
        found = split(config, shape, free)
    except CannotStart as error:
        found, said = None, str(error)
    if found is None:
        assert "\n" not in said
        return
    static = found.part * free
    weights = memory.server(config, shape, gpu=True).parts["weights"]
    cache = memory.cache_bytes(shape, 2) * context
    assert weights + cache <= static + 0.01 * free, "at least one request of full length"
    needs = [each.need.total for each in memory.trainer_ranks(config, shape)]
    if found.sharing is Sharing.SHARED:
        assert static + min(needs) / SURELY < free
    else:
        assert min(needs) <= SURELY * (free - ASLEEP)


# ------------------------------------------------------------------ auto


@pytest.mark.parametrize(
    ("size", "gpus", "gib", "mode"),
    [
        ("0.5B", 0, 0, "sglang:d1+fsdp:d1"),
        ("0.5B", 1, 24, "sglang:d1|fsdp:d1"),
        ("1.5B", 1, 80, "sglang:d1|fsdp:d1"),
        ("1.5B", 2, 80, "sglang:d1+fsdp:d1"),
        ("1.5B", 2, 24, "sglang:d2|fsdp:d2"),
        ("1.5B", 8, 80, "sglang:d4+fsdp:d4"),
        ("7B", 1, 80, ""),
        ("7B", 2, 80, ""),
        ("7B", 4, 80, "sglang:d1+fsdp:d3"),
        ("7B", 8, 80, "sglang:d4+fsdp:d4"),
        ("32B", 8, 80, ""),
        ("32B", 8, 180, "sglang:d4+fsdp:d4"),
        ("72B", 8, 180, ""),
        ("", 1, 80, "sglang:d1|fsdp:d1"),
        ("", 3, 80, "sglang:d2+fsdp:d1"),
    ],
)
def test_auto_when_machines_and_models_differ_then_an_allocation_of_all_gpus_or_one_line(
    tmp_path: Path, size: str, gpus: int, gib: int, mode: str
) -> None:
    config = make("auto", gpus=gpus)
    shape = shape_of(tmp_path, size) if size else None
    if not mode:
        with pytest.raises(CannotStart, match=r"^allocation_mode 'auto': \d GPUs? with "):
            choose(config, shape, [gib * GIB] * gpus)
        return
    choice = choose(config, shape, [gib * GIB] * gpus)
    assert choice.allocation_mode == mode
    assert "\n" not in choice.why
    if gpus:
        assert parse_allocation(mode).gpus == gpus


def test_auto_when_a_gpu_is_busy_then_the_fullest_decides(tmp_path: Path) -> None:
    config, shape = make("auto", gpus=2), shape_of(tmp_path, "1.5B")
    choice = choose(config, shape, [80 * GIB, 24 * GIB])
    assert choice.allocation_mode == "sglang:d2|fsdp:d2"
    assert "24.0 GiB free" in choice.why


def test_auto_when_servers_take_no_gpu_then_all_of_them_train(tmp_path: Path) -> None:
    config = make("auto", "stack.inference_command=cpu", gpus=4)
    choice = choose(config, shape_of(tmp_path, "0.5B"), [80 * GIB] * 4)
    assert choice.allocation_mode == "sglang:d1+fsdp:d4"


def test_auto_when_a_batch_has_few_groups_then_no_rank_is_without_one(tmp_path: Path) -> None:
    config = make("auto", "train_dataset.batch_size=2", gpus=8)
    choice = choose(config, shape_of(tmp_path, "0.5B"), [80 * GIB] * 8)
    assert choice.allocation_mode == "sglang:d6+fsdp:d2"


# ------------------------------------------------------------------ the launcher


async def launched(folder: Path, config: GRPOConfig) -> tuple[list[str], list[str], GRPOConfig]:
    """What the trainer and each server see, the first server's command, the settled experiment."""
    settled = settle_here(config)
    placement = await Cluster(settled.servers_part).open(config)
    plan = plan_stack(config, RunFolder(folder / "run"), with_trainer=True, placement=placement)
    assert plan.trainer is not None
    processes = [plan.trainer, *plan.inference]
    seen = [each.environment["CUDA_VISIBLE_DEVICES"] for each in processes]
    return seen, list(plan.inference[0].argv), plan.config


async def test_run_when_one_gpu_is_shared_then_both_see_it_and_the_server_takes_its_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, tmp_path, there=2, visible="1", free=80 * GIB)
    model = write_model(tmp_path / "model", "1.5B")
    config = make("sglang:d1|fsdp:d1", f"model.path={model}")
    seen, argv, resolved = await launched(tmp_path, config)
    assert seen == ["1", "1"]
    part = float(argv[argv.index("--mem-fraction-static") + 1])
    assert 0.2 < part < 0.7
    assert "--enable-memory-saver" not in argv
    assert resolved.allocation_mode == "sglang:d1|fsdp:d1@shared"


async def test_run_when_they_take_turns_then_servers_can_release_their_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, tmp_path, there=4, free=80 * GIB)
    model = write_model(tmp_path / "model", "3B")
    config = make("sglang:d2|fsdp:d2@alternating", f"model.path={model}", gpus=4)
    seen, argv, resolved = await launched(tmp_path, config)
    assert seen == ["0,1", "0", "1"]
    assert argv[-1] == "--enable-memory-saver"
    assert float(argv[argv.index("--mem-fraction-static") + 1]) > 0.7
    assert resolved.allocation_mode == "sglang:d2|fsdp:d2@alternating"
    assert WeightSyncConfig.from_experiment(resolved).turns
    rollout = RolloutConfig.from_experiment(resolved)
    assert rollout.asleep_s == 5 * rollout.setup_timeout_s
    assert rollout.episode_timeout_s > 4 * rollout.asleep_s


@pytest.mark.parametrize(
    ("asked", "gpus", "way"),
    [
        ("sglang:d1|fsdp:d1", 1, "sglang:d1|fsdp:d1@alternating"),
        ("auto", 1, "sglang:d1|fsdp:d1@alternating"),
        ("sglang:d1|fsdp:d1@alternating", 0, "sglang:d1|fsdp:d1@alternating"),
        ("sglang:d1|fsdp:d1", 0, "sglang:d1|fsdp:d1@shared"),  # on CPUs nothing has to fit
    ],
)
def test_settle_when_both_do_not_fit_at_once_then_they_take_turns_and_it_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str, gpus: int, way: str
) -> None:
    install(monkeypatch, tmp_path, there=1, free=70 * GIB)
    model = write_model(tmp_path / "model", "3B")
    config = make(asked, f"model.path={model}", gpus=gpus)
    why = settle_here(config).why
    assert config.allocation_mode == way
    assert "\n" not in why
    if gpus:
        assert "both do not fit at once" in why
        assert "so they take turns" in why


def test_plan_when_they_take_turns_then_the_server_can_release_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, tmp_path, there=2)
    config = make("sglang:d1|fsdp:d1@alternating", f"model.path={tmp_path}")
    placement = replace(assign(config, [Node()], "127.0.0.1"), servers_part=0.83)
    plan = plan_stack(config, RunFolder(tmp_path), with_trainer=True, placement=placement)
    assert plan.inference[0].argv[-3:] == (
        "--mem-fraction-static",
        "0.83",
        "--enable-memory-saver",
    )


@pytest.mark.parametrize("asked", ["sglang:d1+fsdp:d1", "sglang:d1|fsdp:d1@shared"])
def test_services_when_no_one_takes_turns_then_their_deadlines_are_as_ever(asked: str) -> None:
    ends = [f"endpoints.{name}=127.0.0.1:7000" for name in ("buffer", "reward", "weight_sync")]
    config = make(asked, *ends, gpus=0)
    assert not WeightSyncConfig.from_experiment(config).turns
    rollout = RolloutConfig.from_experiment(config)
    assert rollout.asleep_s == 0
    assert rollout.episode_timeout_s == 4 * rollout.request_timeout_s


async def test_run_when_the_command_has_a_fraction_then_it_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, tmp_path, there=1, free=80 * GIB)
    model = write_model(tmp_path / "model", "0.5B")
    command = "stack.inference_command='python -m sglang.launch_server --mem-fraction-static 0.3'"
    _, argv, _ = await launched(tmp_path, make("sglang:d1|fsdp:d1", f"model.path={model}", command))
    assert argv.count("--mem-fraction-static") == 1


async def test_run_when_it_has_no_gpu_then_both_share_the_cpus(tmp_path: Path) -> None:
    seen, argv, resolved = await launched(tmp_path, make("sglang:d1|fsdp:d1", gpus=0))
    assert seen == ["", ""]
    assert argv[2] == "areal_inference"
    assert resolved.allocation_mode == "sglang:d1|fsdp:d1@shared"


async def test_run_when_auto_then_the_experiment_has_what_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, tmp_path, there=8, free=80 * GIB)
    model = write_model(tmp_path / "model", "1.5B")
    config = make("auto", f"model.path={model}", gpus=8)
    seen, _, resolved = await launched(tmp_path, config)
    assert seen == ["0,1,2,3", "4", "5", "6", "7"]
    assert resolved.allocation_mode == "sglang:d4+fsdp:d4"


@pytest.mark.parametrize("torch", ["cpu build", "driver too old"])
def test_auto_when_no_gpu_can_be_used_then_the_line_of_any_other_allocation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torch: str
) -> None:
    install(monkeypatch, tmp_path, torch=torch)
    with pytest.raises(CannotStart, match=r"^stack\.gpus_per_node 2: no GPU can be used"):
        settle_here(make("auto", gpus=2))


def test_doctor_when_allocation_is_open_then_its_row_says_what_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, tmp_path, there=1, free=80 * GIB)
    config = make("auto", f"model.path={write_model(tmp_path / 'model', '1.5B')}")
    rows = {row.name: row for row in examine_here(config, can_prepare=True)}
    assert rows["allocation"].verdict == "ok"
    assert "is 'sglang:d1|fsdp:d1@shared'" in rows["allocation"].found
    assert rows["gpus"].found.startswith("trainer 0; servers 0; ")
    assert config.allocation_mode == "auto", "looking changes nothing"


def test_doctor_when_it_does_not_fit_then_its_row_is_what_a_run_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, tmp_path, there=1, free=24 * GIB)
    config = make("auto", f"model.path={write_model(tmp_path / 'model', '7B')}")
    [row] = [r for r in examine_here(config, can_prepare=True) if r.name == "allocation"]
    assert row.verdict.fatal
    with pytest.raises(CannotStart, match=re.escape(row.found)):
        settle_here(config)


def test_refusal_when_one_gpu_is_too_few_then_names_the_shared_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, tmp_path, there=1)
    config = make("sglang:d1+fsdp:d1")
    found = judge(config, look(config)).gpus
    assert "allocation_mode='sglang:d1|fsdp:d1'" in found.fix


def test_transport_when_a_gpu_is_shared_then_a_broadcast_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^weight_sync.transport 'distributed': expected disk"):
        make("sglang:d1|fsdp:d1", "weight_sync.transport=distributed")
