"""The fused head against the plain formula in float64."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from areal.errors import InvalidInput
from areal_torch.engines.model.heads import chosen_logprobs, logprobs_of

VOCABULARY, DIM, TOKENS = 37, 16, 23


def make_model(*, bias=False, **config):
    head = nn.Linear(DIM, VOCABULARY, bias=bias, dtype=torch.float64)
    text = SimpleNamespace(model_type="tiny", **config)
    return SimpleNamespace(
        get_output_embeddings=lambda: head,
        config=SimpleNamespace(get_text_config=lambda: text),
        head=head,
    )


def make_case(seed, **config):
    torch.manual_seed(seed)
    model = make_model(**config)
    nn.init.normal_(model.head.weight)
    hidden = torch.randn(TOKENS, DIM, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(VOCABULARY, (TOKENS,))
    return model, hidden, labels, torch.randn(TOKENS, dtype=torch.float64)


def plain(model, hidden, labels, temperature):
    config = model.config.get_text_config()
    logits = model.head(hidden) * getattr(config, "logit_scale", 1.0)
    cap = getattr(config, "final_logit_softcapping", None)
    logits = logits if cap is None else torch.tanh(logits / cap) * cap
    return logprobs_of(logits, labels, temperature)


def gradients(outputs, above, *inputs):
    return torch.autograd.grad((outputs[0] * above).sum(), inputs)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("rows", [TOKENS, 5, 1])
@pytest.mark.parametrize(
    "config",
    [{}, {"bias": True}, {"logit_scale": 0.25}, {"final_logit_softcapping": 3.0, "bias": True}],
    ids=str,
)
def test_head_when_fused_then_matches_the_plain_formula(seed, rows, config):
    model, hidden, labels, above = make_case(seed, **config)
    inputs = [hidden, *model.head.parameters()]
    expected = plain(model, hidden, labels, 0.7)
    ours = chosen_logprobs(model, hidden, labels, 0.7, chunk_elements=rows * VOCABULARY)
    torch.testing.assert_close(ours[0], expected[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours[1], expected[1], rtol=1e-12, atol=1e-12)
    assert not ours[1].requires_grad
    for ours_one, expected_one in zip(
        gradients(ours, above, *inputs), gradients(expected, above, *inputs), strict=True
    ):
        torch.testing.assert_close(ours_one, expected_one, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("rows", [TOKENS, 4])
@pytest.mark.parametrize("config", [{"bias": True}, {"final_logit_softcapping": 2.0}], ids=str)
def test_head_when_differentiated_numerically_then_agrees(rows, config):
    model, hidden, labels, _ = make_case(0, **config)

    def run(hidden, *_):
        return chosen_logprobs(model, hidden, labels, 1.3, chunk_elements=rows * VOCABULARY)[0]

    assert torch.autograd.gradcheck(run, (hidden, *model.head.parameters()))


@pytest.mark.parametrize("rows", [TOKENS, TOKENS // 2, 4])
@pytest.mark.parametrize("config", [{}, {"final_logit_softcapping": 2.0}], ids=str)
def test_head_when_a_token_has_several_ids_some_equal_then_each_counts(rows, config):
    model, hidden, *_ = make_case(0, **config)
    labels = torch.randint(4, (TOKENS, 5))  # five of four ids: at least two are equal
    above = torch.randn(TOKENS, 5, dtype=torch.float64)
    inputs = [hidden, model.head.weight]
    columns = [plain(model, hidden, column, 0.7)[0] for column in labels.T]
    expected = torch.stack(columns, -1), None
    ours = chosen_logprobs(model, hidden, labels, 0.7, chunk_elements=rows * VOCABULARY)
    torch.testing.assert_close(ours[0], expected[0], rtol=1e-12, atol=1e-12)
    for mine, theirs in zip(
        gradients(ours, above, *inputs), gradients(expected, above, *inputs), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-12)


def test_head_when_frozen_then_gives_no_gradient_to_it():
    model, hidden, labels, above = make_case(0)
    model.head.requires_grad_(False)
    ours = chosen_logprobs(model, hidden, labels, 1.0, chunk_elements=1 << 20)
    (ours[0] * above).sum().backward()
    assert model.head.weight.grad is None
    assert hidden.grad is not None


def test_head_when_bfloat16_then_gradients_of_many_chunks_add_up_in_float32():
    """Many chunks are as exact as one: a sum in bfloat16 would be 10 times farther away."""
    torch.manual_seed(0)
    tokens = 1024
    model, *_ = make_case(1)
    exact = torch.randn(tokens, DIM).bfloat16()
    labels = torch.randint(VOCABULARY, (tokens,))
    model.head.bfloat16()
    narrow, wide = model.head.weight, model.head.weight.detach().double().requires_grad_(True)
    expected = logprobs_of(exact.double() @ wide.T, labels, 1.0)
    expected_grad = torch.autograd.grad(expected[0].sum(), wide)[0]
    for rows in (tokens, 4):
        ours = chosen_logprobs(model, exact, labels, 1.0, chunk_elements=rows * VOCABULARY)
        assert ours[0].dtype == torch.float32
        torch.testing.assert_close(ours[0].double(), expected[0], rtol=1e-5, atol=1e-5)
        grad = torch.autograd.grad(ours[0].sum(), narrow)[0]
        assert grad.dtype == torch.bfloat16
        error = (grad.double() - expected_grad).norm() / expected_grad.norm()
        assert error < 2**-8  # one rounding


def test_head_when_it_is_no_linear_layer_then_is_refused():
    model, hidden, labels, _ = make_case(0)
    model.get_output_embeddings = lambda: nn.Identity()
    with pytest.raises(InvalidInput, match="head of type Identity: expected Linear"):
        chosen_logprobs(model, hidden, labels, 1.0, chunk_elements=100)
