"""The forward pass against transformers."""

from pathlib import Path

import pytest
import torch
from tests.inference_server import make_model

from areal_inference.model.config import ModelConfig, ModelError
from areal_inference.model.kv_cache import KVCache
from areal_inference.model.transformer import Model
from areal_inference.model.weights import load_weights
from areal_torch.models.cpu_matmul import FLOAT32, Storage

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CASES = {
    "qwen2-tied": ("qwen2", {}),
    "qwen2-untied": ("qwen2", {"tie_word_embeddings": False}),
    "qwen2-one-kv-head": ("qwen2", {"num_key_value_heads": 1}),
    "llama-untied": ("llama", {"tie_word_embeddings": False}),
    "llama-no-grouping": ("llama", {"num_key_value_heads": 4}),
    "llama-biases": ("llama", {"attention_bias": True}),
    "llama-head-dim": ("llama", {"head_dim": 24}),
    "llama-llama3-rope": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "qwen2-other-theta": (
        "qwen2",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    ),
}


def load(
    folder: Path, dtype: torch.dtype = torch.float32, storage: Storage | None = None
) -> tuple[Model, KVCache]:
    config = ModelConfig.from_folder(folder)
    weights = load_weights(str(folder), config, dtype, storage=storage)
    model = Model(config, weights, max_length=256)
    return model, KVCache(config, weights.embed.dtype, max_rows=8, max_length=256)


@pytest.mark.parametrize("case", CASES)
@torch.inference_mode()
def test_logits_when_prefilled_and_decoded_then_equal_transformers(tmp_path: Path, case: str):
    kind, options = CASES[case]
    reference = make_model(tmp_path, kind, **options)
    model, cache = load(tmp_path)
    lengths = [90, 33, 7]
    ids = torch.randint(0, 131, (3, 90))
    cache.reserve(3, 96, budget=10**6)

    hidden = model.prefill(cache, [0, 1, 2], ids.tolist())
    logits = model.logits(hidden.flatten(0, 1)).view(3, 90, -1)
    torch.testing.assert_close(logits, reference(ids).logits, atol=1e-5, rtol=0)

    # Rows of different lengths advance together; what lies beyond a row's length is padding.
    sequences = [ids[row, :length].tolist() for row, length in enumerate(lengths)]
    for _ in range(4):
        tokens = torch.randint(0, 131, (3,))
        positions = torch.tensor([len(sequence) for sequence in sequences])
        logits = model.decode(cache, tokens, positions, span=96)
        for row, sequence in enumerate(sequences):
            sequence.append(int(tokens[row]))
            expected = reference(torch.tensor([sequence])).logits[0, -1]
            torch.testing.assert_close(logits[row], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("transposed", [False, True])
@torch.inference_mode()
def test_logits_when_bfloat16_then_close_to_transformers(tmp_path: Path, transposed: bool):
    reference = make_model(tmp_path, "qwen2").to(torch.bfloat16)
    model, cache = load(tmp_path, torch.bfloat16, Storage(torch.bfloat16, transposed=transposed))
    ids = torch.randint(0, 131, (1, 40))
    cache.reserve(1, 64, budget=10**6)

    model.prefill(cache, [0], ids[:, :-1].tolist())
    logits = model.decode(cache, ids[:, -1], torch.tensor([39]), span=64)

    expected = reference(ids).logits[0, -1].float()
    error = (logits[0] - expected).abs().max() / expected.abs().max()
    assert error < 0.03  # bfloat16 carries 8 bits


@torch.inference_mode()
def test_logits_when_bfloat16_is_multiplied_in_float32_then_those_of_the_rounded_weights(
    tmp_path: Path,
):
    """Only the arithmetic is wider: the weights are those that a bfloat16 trainer published."""
    reference = make_model(tmp_path, "qwen2")
    for parameter in reference.parameters():
        parameter.copy_(parameter.bfloat16())
    model, cache = load(tmp_path, torch.bfloat16, FLOAT32)
    ids = torch.randint(0, 131, (1, 40))
    cache.reserve(1, 64, budget=10**6)

    model.prefill(cache, [0], ids[:, :-1].tolist())
    logits = model.decode(cache, ids[:, -1], torch.tensor([39]), span=64)

    torch.testing.assert_close(logits[0], reference(ids).logits[0, -1], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architecture GPT2LMHeadModel"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, "rope_type='yarn'"),
        ({"use_sliding_window": True}, "use_sliding_window=True"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"hidden_size": None}, "hidden_size"),
    ],
)
def test_config_when_unsupported_then_one_line_names_it(tmp_path: Path, change, message):
    import json

    make_model(tmp_path)
    file = tmp_path / "config.json"
    raw = json.loads(file.read_text()) | change
    file.write_text(json.dumps({k: v for k, v in raw.items() if v is not None}))
    with pytest.raises(ModelError) as caught:
        ModelConfig.from_folder(tmp_path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_config_when_old_rope_spelling_then_read_alike(tmp_path: Path):
    import json

    make_model(tmp_path, "llama", rope_parameters=LLAMA3_ROPE)
    new = ModelConfig.from_folder(tmp_path)
    file = tmp_path / "config.json"
    raw = json.loads(file.read_text())
    rope = raw.pop("rope_parameters")
    raw |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    file.write_text(json.dumps(raw))
    assert ModelConfig.from_folder(tmp_path) == new
    assert new.rope_scaling is not None
    both = {**raw, "rope_parameters": {**rope, "rope_theta": raw["rope_theta"]}}
    file.write_text(json.dumps(both))
    assert ModelConfig.from_folder(tmp_path) == new
    both["rope_parameters"] = {"rope_type": "default", "rope_theta": raw["rope_theta"]}
    file.write_text(json.dumps(both))
    with pytest.raises(ModelError, match=r"config\.json: rope_parameters=.* differ: expected only"):
        ModelConfig.from_folder(tmp_path)
