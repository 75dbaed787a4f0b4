"""Architectures whose attention is not the plain one: made right, or refused at the start."""

import pytest
import torch
import transformers
from tests.unit.areal_torch.engines.hub_families import SEEING, make_family
from tests.unit.areal_torch.engines.train_fixtures import make_batch, weighted_loss

from areal.config.training import TrainEngineConfig
from areal.errors import InvalidInput
from areal_torch.algorithms import packing
from areal_torch.engines.fsdp import FSDPEngine
from areal_torch.engines.model.packed import PackedCausalLM
from areal_torch.engines.model.self_test import self_test
from areal_torch.engines.model.source import load_model
from areal_torch.engines.parallel.memory import use_kernels

SIZE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def wild_model(folder, kind, **options):
    """Save a model with weights large enough for errors to show; returns it too."""
    config = transformers.CONFIG_MAPPING[kind](**{**SIZE, **options})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        hf = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        with torch.no_grad():
            for parameter in hf.parameters():
                spread = 1.5 / parameter.shape[-1] ** 0.5 if parameter.ndim > 1 else 0.2
                parameter.add_(torch.randn_like(parameter) * spread)
    hf.save_pretrained(folder)
    return hf.eval()


@pytest.fixture
def initialize():
    engines = []

    def make(folder, **options):
        engine = FSDPEngine(TrainEngineConfig(path=str(folder), dtype="float32", **options))
        engines.append(engine)
        engine.initialize()
        return engine

    yield make
    for engine in reversed(engines):
        engine.destroy()


def alone(hf, batch):
    """Logprobs of plain transformers, one sequence at a time."""
    parts = []
    for sequence in packing.unpack(batch):
        ids = sequence["input_ids"]
        with torch.no_grad():
            logits = hf(input_ids=ids[None], use_cache=False).logits[0, :-1].float()
        logprobs = torch.log_softmax(logits, -1).gather(-1, ids[1:, None])[:, 0]
        logprobs = torch.cat([logprobs.new_zeros(1), logprobs])
        parts.append(torch.where(sequence["loss_mask"], logprobs, 0.0))
    return torch.cat(parts)


MLA = {"kv_lora_rank": 16, "q_lora_rank": 12, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
MLA |= {"v_head_dim": 12, "num_key_value_heads": 4, "first_k_dense_replace": 2}
MADE_RIGHT = {
    "gemma2": {"head_dim": 8, "final_logit_softcapping": 2.0, "attn_logit_softcapping": 3.0},
    "cohere": {"logit_scale": 0.3},
    "granite": {"logits_scaling": 3.0},
    "hyperclovax": {"logits_scaling": 3.0},
    "deepseek_v3": MLA,
    "deepseek_v32": MLA | {"index_topk": 3},
    "gpt_oss": {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "seed_oss": {"head_dim": 8, "residual_dropout": 0.5, "attention_dropout": 0.5},
    "phimoe": {"num_local_experts": 4, "router_jitter_noise": 0.3, "input_jitter_noise": 0.3},
}


RECOMPUTED = {"gradient_checkpointing": True}


@pytest.mark.parametrize("kind", MADE_RIGHT)
@pytest.mark.parametrize("options", [{}, {"logits_chunk_elements": 300}, RECOMPUTED])
def test_forward_when_an_architecture_differs_from_llama_then_equals_transformers(
    tmp_path, initialize, kind, options
):
    hf = wild_model(tmp_path, kind, **MADE_RIGHT[kind])
    engine = initialize(tmp_path, **options)
    batch = make_batch(vocabulary=96)
    expected = alone(hf, batch)
    torch.testing.assert_close(engine.forward(batch), expected, atol=4e-5, rtol=0)

    def loss(logprobs, entropies, mb):
        # The forward of training is the same function: no dropout, no jitter.
        torch.testing.assert_close(logprobs.detach(), expected, atol=4e-5, rtol=0)
        return weighted_loss(logprobs, entropies, mb)

    assert engine.train_batch(batch, loss)["grad_norm"] > 0


REFUSED = {
    "minimax_m3_vl_text": (
        {"layer_types": ["full_attention", "minimax_m3_sparse"]},
        "layers of type minimax_m3_sparse",
    ),
    "gptj": ({"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4}, "custom attention"),
    "doge": ({}, "DogeAttention calls attention with attention_mask"),
    "stablelm": ({}, "StableLmAttention is not told how the batch is packed"),
    "bert": ({}, "BertSelfAttention lets tokens see later tokens"),
    "roberta": ({"is_decoder": True}, "differ by .* nats a token"),
    "bart": ({"d_model": 32, "decoder_layers": 2, "decoder_ffn_dim": 48}, "positions are counted"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_initialize_when_packed_attention_would_be_wrong_then_refuses(tmp_path, initialize, kind):
    options, named = REFUSED[kind]
    hf = wild_model(tmp_path, kind, **options)
    with pytest.raises(InvalidInput, match=named) as refusal:
        initialize(tmp_path)
    assert type(hf).__name__ in str(refusal.value)
    assert "choose another model" in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_initialize_when_the_model_is_right_then_logs_the_difference(tmp_path, initialize, capsys):
    wild_model(tmp_path, "qwen3", head_dim=8)
    initialize(tmp_path)
    line = capsys.readouterr().out
    assert "self_test_passed" in line
    assert "Qwen3ForCausalLM" in line
    assert "tolerance" in line


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_forward_when_rope_would_depend_on_the_neighbors_then_refuses_long_sequences(
    tmp_path, initialize, kind
):
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0}
    if kind == "longrope":
        factors = {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
        rope |= {**factors, "original_max_position_embeddings": 24}
        options = {"original_max_position_embeddings": 24}
        hf = wild_model(tmp_path, "phi3", rope_parameters=rope, **options)
    else:
        hf = wild_model(tmp_path, "llama", rope_parameters=rope, max_position_embeddings=24)
    engine = initialize(tmp_path)
    short = make_batch(vocabulary=96)
    torch.testing.assert_close(engine.forward(short), alone(hf, short), atol=4e-5, rtol=0)
    long = packing.pack([{"input_ids": [5] * 25, "loss_mask": [False] + [True] * 24}])
    with pytest.raises(
        InvalidInput,
        match=r"sequence of 25 tokens: beyond 24 .*rope|25 tokens, expected at most 24",
    ):
        engine.forward(long)


@pytest.mark.parametrize("kind", ["qwen3", "qwen2_5_vl"])
def test_self_test_when_layers_are_compiled_then_attention_stays_apart(tmp_path, kind):
    hf = load_model(str(make_family(kind, tmp_path)), torch.float32, from_scratch=False, seed=0)
    model = PackedCausalLM(hf, kernel="packed", chunk_elements=1 << 20)
    cpu = torch.device("cpu")
    use_kernels(hf, [], "compile", cpu)  # as where layers are compiled, without the minutes
    names = [config._attn_implementation for config in configs_of(hf)]
    assert names[0] == "areal_packed_apart"
    assert names[1:] == (["sdpa"] if kind in SEEING else [])  # patches see all others
    self_test(model, cpu, torch.float32)
    assert [config._attn_implementation for config in configs_of(hf)] == names


def configs_of(hf):
    """Of the layers of text, and of the tower that sees."""
    vision = getattr(hf.config, "vision_config", None)
    return [hf.config.get_text_config(), *([vision] if vision else [])]


def test_self_test_when_a_model_is_big_then_runs_its_first_layers_of_every_kind(
    tmp_path, monkeypatch
):
    kinds = ["sliding_attention"] * 5 + ["full_attention"] + ["sliding_attention"] * 3
    options = {"num_hidden_layers": 9, "layer_types": kinds, "head_dim": 8, "sliding_window": 7}
    wild_model(tmp_path, "gemma3_text", **options)
    hf = load_model(str(tmp_path), torch.float32, from_scratch=False, seed=0)
    model = PackedCausalLM(hf, kernel="packed", chunk_elements=1 << 20)
    everything = self_test(model, torch.device("cpu"), torch.float32)
    monkeypatch.setattr("areal_torch.engines.model.self_test.WHOLE", 1000)
    found = self_test(model, torch.device("cpu"), torch.float32)
    assert (everything.layers, found.layers) == (9, 6)
    assert found.difference < 1e-5
    assert len(hf.model.layers) == 9


@pytest.mark.parametrize(("options", "times"), [({}, 1), (RECOMPUTED, 2)])
def test_train_batch_when_activations_are_recomputed_then_each_layer_runs_twice(
    tmp_path, initialize, options, times
):
    # The model is in eval(), which alone would switch transformers' recomputing off.
    wild_model(tmp_path, "qwen3", head_dim=8)
    engine = initialize(tmp_path, **options)
    calls = []
    engine.model.hf.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    engine.train_batch(make_batch(vocabulary=96), weighted_loss)
    assert len(calls) == times


def test_initialize_when_transformers_does_not_know_the_architecture_then_says_so_in_a_line(
    tmp_path, initialize
):
    (tmp_path / "config.json").write_text('{"model_type": "no_such_model"}')
    with pytest.raises(
        InvalidInput, match=r"transformers cannot load it.*no_such_model"
    ) as refusal:
        initialize(tmp_path)
    assert "\n" not in str(refusal.value)


def test_self_test_when_a_weight_is_not_finite_then_it_is_named(tmp_path):
    wild_model(tmp_path, "llama")
    hf = load_model(str(tmp_path), torch.float32, from_scratch=False, seed=0)
    with torch.no_grad():
        hf.model.norm.weight[3] = float("nan")
    model = PackedCausalLM(hf, kernel="packed", chunk_elements=1 << 20)
    with pytest.raises(
        InvalidInput, match=r"'model\.norm\.weight' holds NaN or infinity; expected finite"
    ):
        self_test(model, torch.device("cpu"), torch.float32)


def test_self_test_when_the_config_makes_logprobs_nan_then_it_says_so(tmp_path):
    wild_model(tmp_path, "llama", rms_norm_eps=float("nan"))
    hf = load_model(str(tmp_path), torch.float32, from_scratch=False, seed=0)
    model = PackedCausalLM(hf, kernel="packed", chunk_elements=1 << 20)
    with pytest.raises(InvalidInput, match=r"logprobs are not finite.*config\.json") as caught:
        self_test(model, torch.device("cpu"), torch.float32)
    assert "choose another model" not in str(caught.value)
