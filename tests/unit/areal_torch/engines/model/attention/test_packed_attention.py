from types import SimpleNamespace

import pytest
import torch
from tests.unit.areal_torch.engines.train_fixtures import make_batch

from areal.errors import InvalidInput
from areal_torch.algorithms import packing
from areal_torch.engines.model.attention.dispatch import PACKED, attention_function
from areal_torch.engines.model.attention.layout import build_layout

packed_attention = attention_function(PACKED)


def dense_attention(q, k, v, cu_seqlens, window):
    """One sequence and one head at a time."""
    heads, kv_heads = q.shape[1], k.shape[1]
    out = torch.zeros(1, q.shape[2], heads, q.shape[3], dtype=q.dtype)
    for begin, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        for h in range(heads):
            kv = h * kv_heads // heads
            scores = q[0, h, begin:end] @ k[0, kv, begin:end].T * 0.3
            distance = torch.arange(end - begin)[:, None] - torch.arange(end - begin)
            hidden = distance < 0
            if window:
                hidden |= distance >= window
            weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            out[0, begin:end, h] = weights @ v[0, kv, begin:end]
    return out


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("lengths", [[3, 17, 1, 9, 16, 2], [150, 3, 70, 64, 65, 1]])
def test_packed_attention_when_lengths_vary_then_equals_dense(kv_heads, window, lengths):
    g = torch.Generator().manual_seed(0)
    batch = packing.pack([{"input_ids": [0] * n, "loss_mask": [False] * n} for n in lengths])
    layout = build_layout(batch, share_prefixes=False)
    total = sum(lengths)
    q, k, v = (
        torch.randn(1, h, total, 8, generator=g, dtype=torch.float64, requires_grad=True)
        for h in (4, kv_heads, kv_heads)
    )
    ours, _ = packed_attention(
        None, q, k, v, None, packed_layout=layout, scaling=0.3, sliding_window=window
    )
    expected = dense_attention(q, k, v, batch["cu_seqlens"], window)
    torch.testing.assert_close(ours, expected)
    weight = torch.randn(ours.shape, generator=g, dtype=torch.float64)
    for a, b in zip(
        torch.autograd.grad((ours * weight).sum(), (q, k, v)),
        torch.autograd.grad((expected * weight).sum(), (q, k, v)),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


def test_build_layout_when_sequences_share_prefixes_then_computes_them_once():
    batch = packing.pack(
        [
            {"input_ids": ids, "loss_mask": [False] * len(ids)}
            for ids in ([1, 2, 3, 4], [1, 2, 9], [1, 2, 3], [1, 2, 3, 4], [7, 2, 3])
        ],
        group_index=[0, 0, 0, 1, 1],
    )
    layout = build_layout(batch, share_prefixes=True)
    # Group 0: 1 2 3 4, then 9; group 1 starts over: 1 2 3 4, then 7 2 3 (differs from the first
    # token on).
    assert batch["input_ids"][layout.computed].tolist() == [1, 2, 3, 4, 9, 1, 2, 3, 4, 7, 2, 3]
    assert layout.locate.tolist() == [0, 1, 2, 3, 0, 1, 4, 0, 1, 2, 5, 6, 7, 8, 9, 10, 11]
    assert layout.position_ids.tolist() == [0, 1, 2, 3, 2, 0, 1, 2, 3, 0, 1, 2]
    alone = build_layout(batch, share_prefixes=False)
    assert alone.computed.tolist() == list(range(17))
    # 5 of 17 tokens need not be computed.
    for least, count in ((0.29, 12), (0.3, 17)):
        found = build_layout(batch, share_prefixes=True, least=least)
        assert len(found.computed) == count
        assert found.shared == (count < 17)
        assert found.locate.max() == count - 1


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("share_prefixes", [True, False])
def test_build_layout_when_batches_vary_then_each_place_holds_its_token(seed, share_prefixes):
    batch = make_batch(seed, groups=6, longest=40, vocabulary=3)
    layout = build_layout(batch, share_prefixes=share_prefixes)
    ids = batch["input_ids"]
    assert torch.equal(ids[layout.computed][layout.locate], ids)
    places = torch.cat([bucket.index for bucket in layout.buckets])
    # Each computed token is read from a place that holds it.
    assert torch.equal(places[layout.output], torch.arange(len(layout.computed)))
    assert len(places) <= 1.5 * len(ids) + 8 * len(batch["group_index"])


def written_out(q, k, v, batch, *, scaling, window=None, softcap=None, sinks=None):
    """The definition, one sequence and one head at a time."""
    fold = q.shape[1] // k.shape[1]
    parts = []
    for begin, end in zip(batch["cu_seqlens"][:-1], batch["cu_seqlens"][1:], strict=True):
        heads = []
        for h in range(q.shape[1]):
            scores = q[0, h, begin:end] @ k[0, h // fold, begin:end].T * scaling
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            distance = torch.arange(end - begin)[:, None] - torch.arange(end - begin)
            hidden = (distance < 0) | (distance >= (window or 10**9))
            scores = scores.masked_fill(hidden, float("-inf"))
            if sinks is not None:
                scores = torch.cat([scores, sinks[h].expand(len(scores), 1)], 1)
            weights = scores.softmax(-1)[:, : end - begin]
            heads.append(weights @ v[0, h // fold, begin:end])
        parts.append(torch.stack(heads, 1))
    return torch.cat(parts)[None]


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(("softcap", "with_sinks"), [(None, False), (2.0, False), (None, True)])
def test_packed_attention_when_softcap_sinks_or_narrow_values_then_equals_the_definition(
    window, softcap, with_sinks
):
    g = torch.Generator().manual_seed(1)
    lengths = [3, 17, 1, 70, 530]
    batch = packing.pack([{"input_ids": [0] * n, "loss_mask": [False] * n} for n in lengths])
    layout = build_layout(batch, share_prefixes=False)

    def leaf(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64, requires_grad=True)

    total = sum(lengths)
    q, k, v = leaf(1, 4, total, 8), leaf(1, 2, total, 8), leaf(1, 2, total, 6)
    sinks = leaf(4) if with_sinks else None
    ours, _ = packed_attention(
        None,
        q,
        k,
        v,
        None,
        packed_layout=layout,
        scaling=0.9,
        sliding_window=window,
        softcap=softcap,
        s_aux=sinks,
    )
    expected = written_out(q, k, v, batch, scaling=0.9, window=window, softcap=softcap, sinks=sinks)
    assert ours.shape == (1, total, 4, 6)
    torch.testing.assert_close(ours, expected)
    weight = torch.randn(ours.shape, generator=g, dtype=torch.float64)
    leaves = (q, k, v, sinks) if with_sinks else (q, k, v)
    for a, b in zip(
        torch.autograd.grad((ours * weight).sum(), leaves),
        torch.autograd.grad((expected * weight).sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"head_mask": torch.ones(4)}, r"Linear calls attention with head_mask=a tensor \[4\]"),
        ({"position_bias": torch.ones(4, 3, 3)}, "position_bias"),
        ({"dropout": 0.1}, "dropout=0.1"),
        ({"is_causal": False}, "is_causal=False"),
        ({"made_up": 3}, "made_up=3"),
        ({"softcap": 2.0, "s_aux": torch.ones(4)}, "s_aux"),
        ({"attention_mask": torch.ones(3, 3)}, "attention_mask"),
        ({"packed_layout": None}, "not told how the batch is packed"),
    ],
)
def test_packed_attention_when_asked_for_what_it_does_not_compute_then_refuses(arguments, named):
    batch = packing.pack([{"input_ids": [0] * 3, "loss_mask": [False] * 3}])
    layout = build_layout(batch, share_prefixes=False)
    q = torch.zeros(1, 4, 3, 8)
    neutral = {
        "dropout": 0.0,
        "is_causal": True,
        "position_ids": torch.arange(3),
        "head_mask": None,
    }
    options = {"packed_layout": layout, "attention_mask": None, **neutral}
    packed_attention(torch.nn.Linear(1, 1), q, q, q, **options)
    with pytest.raises(InvalidInput, match=named):
        packed_attention(torch.nn.Linear(1, 1), q, q, q, **{**options, **arguments})


@pytest.mark.parametrize("layer_types", [["full_attention", "sliding_attention"], None])
def test_packed_attention_when_a_window_is_not_passed_on_then_refuses_longer_sequences(layer_types):
    module = torch.nn.Identity()
    module.config = SimpleNamespace(layer_types=layer_types, sliding_window=3)

    def attend(layer, length, **options):
        module.layer_idx = layer
        q = torch.zeros(1, 4, length, 8)
        batch = packing.pack([{"input_ids": [0] * length, "loss_mask": [False] * length}])
        layout = build_layout(batch, share_prefixes=False)
        packed_attention(module, q, q, q, None, packed_layout=layout, **options)

    if layer_types:
        attend(0, 4)
    attend(1, 3)
    attend(1, 4, sliding_window=3)
    with pytest.raises(InvalidInput, match=r"sliding window of 3 tokens.* sequence of 4"):
        attend(1, 4)
