"""The test at the start of a mixture of experts in 16 bits, where rounding flips routers."""

import pytest
import torch
import transformers

from areal.errors import InvalidInput
from areal_torch.engines.model import self_test as tested
from areal_torch.engines.model.attention import dispatch, packed
from areal_torch.engines.model.packed import PackedCausalLM

pytestmark = pytest.mark.filterwarnings("ignore")
CPU = torch.device("cpu")
SEEDS = [0, 1, 3]


def mixture(seed):
    """A qwen3_moe in bfloat16 that is most of all its experts, one of 128 for a token."""
    torch.set_num_threads(1)
    config = transformers.Qwen3MoeConfig(
        vocab_size=96,
        hidden_size=64,
        moe_intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=128,
        num_experts_per_tok=1,
        max_position_embeddings=128,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        hf = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        for name, parameter in hf.named_parameters():
            if parameter.ndim >= 2:
                own = "experts" in name or "self_attn" in name
                spread = (6.0 if own else 2.0) / parameter.shape[-1] ** 0.5
                parameter.copy_(torch.randn_like(parameter) * spread)
    return PackedCausalLM(hf.to(torch.bfloat16).eval(), kernel="packed", chunk_elements=1 << 20)


@pytest.fixture(autouse=True)
def other_rounding(monkeypatch):
    """Packed attention rounds otherwise than eager attention, as kernels of GPUs do."""
    monkeypatch.setattr(packed, "_SHORT", 0)


@pytest.mark.parametrize("seed", SEEDS)
def test_self_test_when_rounding_flips_routers_then_a_healthy_mixture_passes(seed):
    model = mixture(seed)
    batch = tested._batch(96, [])
    free = (tested._packed(model, batch) - tested._alone(model, batch)).abs().mean()
    tolerance = tested.TOLERANCE[torch.bfloat16]
    assert free > tolerance, "no router was flipped: this shows nothing"
    found = tested.self_test(model, CPU, torch.bfloat16)
    assert found.difference <= tolerance
    assert found.replays_routes


@pytest.mark.parametrize("seed", SEEDS)
def test_self_test_when_a_mixture_leaks_between_sequences_then_it_is_still_refused(
    seed, monkeypatch
):
    plain = packed.packed_attention

    def leaking(query, key, value, *args, **kwargs):
        return plain(query, key, 0.9 * value + 0.1 * value.roll(1, 0), *args, **kwargs)

    monkeypatch.setattr(dispatch, "packed_attention", leaking)
    with pytest.raises(InvalidInput, match=r"differ by .* nats a token"):
        tested.self_test(mixture(seed), CPU, torch.bfloat16)
