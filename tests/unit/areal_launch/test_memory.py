"""The memory a run will need: parameter counts, parts, and what `areal doctor` says of them."""

import json
import shutil
from pathlib import Path

import pytest
from tests.unit.areal_launch.gpu_machines import install as machine

from areal.config.allocation import Layout
from areal.config.experiment import (
    GRPOConfig,
    RefConfig,
    build_config,
    micro_batch_tokens,
)
from areal.errors import InvalidInput
from areal.memory_estimate import (
    GIB,
    HEAD_TOKENS,
    LEAST_CHUNK,
    ModelShape,
    Setting,
    choose,
    choose_chunk,
    trainer_rank,
)
from areal_launch.doctor import memory
from areal_launch.doctor.local import examine_here
from areal_launch.view.output import CheckResult

QWEN2_5_7B = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
QWEN3_30B_A3B = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
}


def model(folder: Path, **config: object) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def seven_b(folder: Path) -> GRPOConfig:
    """Qwen2.5-7B on 8 GPUs for training and 8 for generation."""
    config = GRPOConfig(allocation_mode="sglang:d8+fsdp:d8", run_root=str(folder / "runs"))
    config.model.path = str(model(folder, **QWEN2_5_7B))
    config.stack.gpus_per_node = 16
    config.gconfig.n_samples = 8
    return config


def test_parameters_when_only_the_config_is_there_then_those_of_the_published_model(tmp_path):
    dense = ModelShape.read(model(tmp_path, **QWEN2_5_7B))
    assert dense.parameters == 7_615_616_512
    assert dense.root_parameters == 2 * 152064 * 3584 + 3584
    experts = ModelShape.read(model(tmp_path, **QWEN3_30B_A3B))
    assert experts.parameters == pytest.approx(30.532e9, rel=1e-3)
    assert experts.intermediate == 8 * 768


def test_shape_when_every_expert_computes_every_token_then_counts_all_of_them(tmp_path):
    llama = {**QWEN3_30B_A3B, "model_type": "llama4_text", "num_experts_per_tok": 1}
    shape = ModelShape.read(model(tmp_path, **llama))
    assert shape.routed == 128
    assert shape.intermediate == 128 * 768 + llama["intermediate_size"]


def test_parameters_when_the_weights_are_there_then_counted(tiny_model):
    from safetensors.torch import load_file

    stored = load_file(tiny_model / "model.safetensors")
    shape = ModelShape.read(tiny_model)
    assert shape.parameters == sum(tensor.numel() for tensor in stored.values())


def test_trainer_rank_when_ranks_share_less_or_more_then_states_and_layers_follow(tmp_path):
    config = seven_b(tmp_path)
    shape = ModelShape.read(Path(config.model.path))

    def parts(layout: str) -> dict[str, int]:
        config.allocation_mode = f"sglang:d8+fsdp:{layout}"
        return memory.trainer_rank(config, shape, gpu=True).need.parts

    whole = parts("d8")
    assert parts("d8s4")["states"] == pytest.approx(2 * whole["states"]), "two copies"
    assert parts("d4t2")["states"] == whole["states"]
    assert parts("d4t2")["gathered"] < whole["gathered"]
    assert parts("d4c2")["states"] == whole["states"]
    assert parts("d4c2")["activations"] == pytest.approx(whole["activations"] / 2)


def test_shape_when_it_is_no_decoder_then_names_the_missing_key(tmp_path):
    with pytest.raises(InvalidInput, match=r"config\.json': no num_hidden_layers: not a decoder"):
        ModelShape.read(model(tmp_path, hidden_size=8))


def test_trainer_when_7b_on_eight_gpus_then_activations_decide(tmp_path):
    config = seven_b(tmp_path)
    shape = ModelShape.read(tmp_path)
    config.actor.gradient_checkpointing = False
    need = memory.trainer_rank(config, shape, gpu=True).need
    assert need.parts["states"] == pytest.approx(16 * 7.6156e9 / 8, rel=1e-3)
    # 28 layers of some 0.23 MB for each of 10,240 tokens: 6.6 MB a token.
    assert need.parts["activations"] == pytest.approx(67e9, rel=0.05)
    assert need.total > 80 * GIB
    config.actor.gradient_checkpointing = None
    recomputed = memory.trainer_rank(config, shape, gpu=True).need
    assert recomputed.parts["activations"] < 5 * GIB
    assert recomputed.total < 40 * GIB
    config.ref = RefConfig()
    here = memory.trainer_rank(config, shape, gpu=True).need.total - recomputed.total
    config.ref.offload = True
    away = memory.trainer_rank(config, shape, gpu=True).need.total - recomputed.total
    assert here - away == pytest.approx(2 * 7.6156e9 / 8, rel=1e-3)


def test_trainer_when_moments_are_bfloat16_then_states_take_three_quarters(tmp_path):
    config = seven_b(tmp_path)
    shape = ModelShape.read(tmp_path)
    wide = memory.trainer_rank(config, shape, gpu=True)
    assert "actor.optimizer.moments=bfloat16" in wide.ways_out
    assert config.actor.optimizer is not None
    config.actor.optimizer.moments = "bfloat16"
    narrow = memory.trainer_rank(config, shape, gpu=True)
    assert narrow.need.parts["states"] * 4 == wide.need.parts["states"] * 3
    assert "moments" not in narrow.ways_out


def test_chunk_when_memory_is_free_then_the_head_computes_more_tokens_at_once(tmp_path):
    config = seven_b(tmp_path)
    shape = ModelShape.read(tmp_path)

    def tokens(there: float, **options: object) -> float:
        setting = Setting(Layout.parse("d8"), 10_240, **{"gpu": True, **options})
        mode = choose(config.actor, shape, setting, int(there * GIB))
        chunk = choose_chunk(config.actor, shape, setting, mode, int(there * GIB))
        need = trainer_rank(config.actor, shape, setting, mode, chunk=chunk)
        assert mode == "offload" or chunk == LEAST_CHUNK or need.total <= 0.8 * there * GIB
        return chunk / shape.vocabulary

    assert tokens(139) == HEAD_TOKENS
    assert tokens(0) == tokens(139, gpu=False) == LEAST_CHUNK / shape.vocabulary
    found = [tokens(there) for there in range(20, 140, 4)]
    assert set(found) >= {HEAD_TOKENS, LEAST_CHUNK / shape.vocabulary}
    config.actor.logits_chunk_elements = 1000
    assert tokens(139) == 1000 / shape.vocabulary


def test_tokens_when_batches_are_small_or_sequences_long_then_those_of_a_micro_batch():
    config = GRPOConfig(allocation_mode="sglang:d1+fsdp:d2")
    config.train_dataset.batch_size, config.gconfig.n_samples = 3, 2
    config.model.context_length = 64
    assert micro_batch_tokens(config) == 2 * 2 * 64
    config.model.context_length = 32768
    assert micro_batch_tokens(config) == 32768
    config.model.context_length = 4096
    assert micro_batch_tokens(config) == 10240


def test_server_when_it_has_several_gpus_then_weights_and_cache_are_shared(tmp_path):
    config = seven_b(tmp_path)
    shape = ModelShape.read(tmp_path)
    one = memory.server(config, shape, gpu=True)
    assert one.parts["weights"] == 2 * shape.parameters
    # 28 layers x 4 heads x 128 x keys and values x 2 bytes, 256 requests of 4,096 tokens.
    assert one.parts["cache"] == 57344 * 256 * 4096
    config.allocation_mode = "sglang:d4t2+fsdp:d8"
    two = memory.server(config, shape, gpu=True)
    assert two.parts["weights"] == shape.parameters
    assert two.parts["cache"] * 2 == one.parts["cache"]


@pytest.fixture
def gpus(tmp_path, monkeypatch):
    """16 GPUs that have so much free."""

    def install(mebibytes: int) -> None:
        shutil.rmtree(tmp_path / ".venv-sglang-gpu", ignore_errors=True)
        machine(monkeypatch, tmp_path, there=16, free=mebibytes << 20)

    return install


def test_doctor_when_a_rank_does_not_fit_then_missing_with_the_part_that_decides(tmp_path, gpus):
    config = seven_b(tmp_path)
    gpus(80899)
    found = {each.name: each for each in examine_here(config, can_prepare=False)}
    assert found["trainer memory"].verdict is CheckResult.OK
    assert "each rank needs about 54" in found["trainer memory"].found
    assert (
        "gradient_checkpointing=selective; its GPU has 79.0 GiB free"
        in found["trainer memory"].found
    )
    assert found["server memory"].verdict is CheckResult.OK
    assert found["engine"].verdict is CheckResult.OK
    assert "each rank needs" not in found["memory"].found
    config.actor.gradient_checkpointing = False
    found = {each.name: each for each in examine_here(config, can_prepare=False)}
    assert found["trainer memory"].verdict is CheckResult.MISSING
    assert "its GPU has 79.0 GiB free" in found["trainer memory"].found
    fix = found["trainer memory"].fix
    assert fix.startswith("actor.gradient_checkpointing=selective or full or offload, or a smaller")


def test_doctor_when_a_server_has_room_for_some_or_none_then_says_how_many(tmp_path, gpus):
    config = seven_b(tmp_path)
    gpus(24 * 1024)
    found = {each.name: each for each in examine_here(config, can_prepare=False)}
    assert found["server memory"].verdict is CheckResult.OK
    assert " of 256 requests of full length fit, the rest wait" in found["server memory"].found
    gpus(16 * 1024)
    found = {each.name: each for each in examine_here(config, can_prepare=False)}
    assert found["server memory"].verdict is CheckResult.MISSING
    assert "no request of full length fits" in found["server memory"].found


def test_doctor_when_all_is_on_cpus_then_one_row_adds_up_ranks_and_servers(tmp_path, tiny_model):
    config = GRPOConfig(run_root=str(tmp_path), allocation_mode="sglang:d2+fsdp:d1")
    config.model.path, config.model.context_length = str(tiny_model), 64
    found = {each.name: each for each in examine_here(config, can_prepare=False)}
    assert "trainer memory" not in found
    assert "each of 2 servers 0.4 GiB" in found["memory"].found
    assert "each of 1 trainer ranks " in found["memory"].found
    config.allocation_mode = "sglang:d9000+fsdp:d1"
    found = {each.name: each for each in examine_here(config, can_prepare=False)}
    assert found["memory"].verdict is CheckResult.MISSING


@pytest.mark.parametrize(
    ("overrides", "mode"),
    [
        (["model.context_length=32768"], "full"),  # one such sequence needs more than the budget
        (["model.context_length=8192"], "selective"),
        (["model.context_length=8192", "ref={}", "allocation_mode=sglang:d8+fsdp:d4"], "full"),
    ],
)
def test_trainer_when_null_chooses_then_it_is_what_doctor_says(
    tmp_path, monkeypatch, overrides, mode
):
    import torch

    from areal.config.allocation import parse_allocation
    from areal_torch.engines.parallel import memory as engine
    from areal_torch.engines.parallel.mesh import Mesh

    there = 79 * GIB
    folder = model(tmp_path, **QWEN2_5_7B)
    config = build_config(
        GRPOConfig,
        None,
        [f"model.path={folder}", "allocation_mode=sglang:d8+fsdp:d8", *overrides],
    )
    config.actor.path = str(folder)
    layout = parse_allocation(config.allocation_mode).layout
    monkeypatch.setattr(engine, "free_bytes", lambda _: there)
    monkeypatch.setattr(engine.dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(engine, "reduce_scalars", lambda sums, _: sums)
    mesh = Mesh.__new__(Mesh)
    object.__setattr__(mesh, "layout", layout)
    chosen = engine.budget(config.actor, mesh, torch.device("cuda")).mode
    shape = ModelShape.read(folder)
    assert chosen == memory.trainer_rank(config, shape, gpu=True, there=there).mode == mode


def test_trainer_rank_when_a_critic_trains_beside_it_then_its_states_are_counted(tmp_path):
    config = seven_b(tmp_path)
    shape = ModelShape.read(Path(config.model.path))
    alone = memory.trainer_rank(config, shape, gpu=True).need.parts
    config.actor.critic = True
    both = memory.trainer_rank(config, shape, gpu=True).need.parts
    assert both == alone | {"critic": alone["states"]}


@pytest.mark.parametrize("tensor", [1, 2])
def test_trainer_rank_when_a_tensor_group_has_adapters_then_one_matrix_of_each_is_spread(
    tmp_path, tensor
):
    path = model(tmp_path, **QWEN2_5_7B)
    config = build_config(GRPOConfig, None, [f"model.path={path}", "actor.lora.rank=16"])
    shape, layout = ModelShape.read(path), Layout.parse(f"d1t{tensor}")
    states = trainer_rank(config.actor, shape, Setting(layout, 4096, True), "full").parts["states"]
    # The ends of A and B at the hidden state, then those at heads, keys, values and features.
    ends = 7 * 3584 + (2 * 3584 + 2 * 512 + 3 * 18944) // tensor
    adapters = 28 * 16 * ends
    assert states == pytest.approx(2 * shape.parameters / tensor + 16 * adapters, abs=1)
