"""The KV cache: content survives growth, moves and shares; the budget is kept."""

import pytest
import torch

from areal_inference.model.config import ModelConfig
from areal_inference.model.kv_cache import KVCache, round_up

CONFIG = ModelConfig(
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    hidden_size=16,
    intermediate_size=16,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    vocab_size=10,
    max_position_embeddings=512,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    rope_scaling=None,
    tie_word_embeddings=True,
    qkv_bias=True,
    o_bias=False,
    eos_token_ids=frozenset(),
)


def make() -> KVCache:
    return KVCache(CONFIG, torch.float32, max_rows=16, max_length=512)


def test_reserve_when_growing_then_content_is_kept():
    cache = make()
    cache.reserve(2, 40, budget=10**6)
    content = torch.randn(cache.tensor[:, :, :2, :, :40].shape)
    cache.tensor[:, :, :2, :, :40] = content
    cache.reserve(9, 300, budget=10**6)
    assert cache.rows >= 9
    assert cache.length >= 300
    assert torch.equal(cache.tensor[:, :, :2, :, :40], content)
    assert cache.by_position[1].shape == (cache.rows, cache.length, 2, 1, 8)
    assert torch.equal(cache.by_position[1][1, 3, 0, 0], content[1, 0, 1, 0, 3])


@pytest.mark.parametrize(("rows", "length"), [(1, 512), (3, 100), (16, 32), (5, 65)])
def test_reserve_when_budget_is_tight_then_not_exceeded(rows: int, length: int):
    cache = make()
    cache.reserve(16, 32, budget=512)
    cache.reserve(rows, length, budget=512)
    assert cache.rows >= rows
    assert cache.length >= length
    assert cache.rows * cache.length <= 512


def test_reserve_when_large_enough_then_nothing_is_copied():
    cache = make()
    cache.reserve(4, 50, budget=10**6)
    before = cache.tensor
    cache.reserve(3, 60, budget=10**6)
    assert cache.tensor is before


def test_move_share_and_clear_when_used_then_rows_hold_what_they_should():
    cache = make()
    cache.reserve(4, 32, budget=10**6)
    cache.tensor.normal_()
    before = cache.tensor.clone()
    cache.move([3, 2], [0, 1], 20)
    assert torch.equal(cache.tensor[:, :, 0, :, :20], before[:, :, 3, :, :20])
    assert torch.equal(cache.tensor[:, :, 1, :, :20], before[:, :, 2, :, :20])
    assert torch.equal(cache.tensor[:, :, 0, :, 20:], before[:, :, 0, :, 20:])
    cache.share(3, [1, 2], 7)
    assert torch.equal(cache.tensor[:, :, 2, :, :7], before[:, :, 3, :, :7])
    assert torch.equal(cache.tensor[:, :, 2, :, 7:], before[:, :, 2, :, 7:])
    cache.clear(3)
    assert not cache.tensor[:, :, 3].any()
    assert cache.tensor[:, :, 2].any()


def test_reset_when_called_then_memory_is_given_back():
    cache = make()
    cache.reserve(4, 50, budget=10**6)
    cache.reset()
    assert cache.tensor.numel() == 0
    cache.reserve(1, 1, budget=10**6)
    assert cache.rows >= 1


def test_round_up_when_on_the_step_then_unchanged():
    assert [round_up(n) for n in (1, 31, 32, 33, 64)] == [32, 32, 32, 64, 64]
