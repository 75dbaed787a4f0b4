"""Attention in chunks, as in Llama 4: packed sequences are cut at their own multiples."""

import copy
from itertools import pairwise
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.areal_torch.engines.model.attention.flash_on_cpu import torch_kernels
from tests.unit.areal_torch.engines.tiny_families import saved
from tests.unit.areal_torch.engines.train_fixtures import (
    assert_gradients_close,
    gradients,
    make_batch,
)
from tools.gen_models import GRADIENT_TOLERANCE, LOGPROB_TOLERANCE, errors
from tools.tiny_architectures import tiny_config, tiny_model
from transformers import Llama4ForCausalLM, Llama4TextConfig

from areal.config.training import MicroBatchSpec, TrainEngineConfig
from areal.errors import InvalidInput
from areal_torch.algorithms import packing
from areal_torch.engines.fsdp import FSDPEngine
from areal_torch.engines.model import guards, positions
from areal_torch.engines.model.attention import layout as layouts
from areal_torch.engines.model.attention.dispatch import PACKED, attention_function
from areal_torch.engines.model.attention.layout import build_layout
from areal_torch.engines.model.attention.varlen import TORCH
from areal_torch.engines.model.heads import LogprobHead
from areal_torch.engines.model.packed import PackedCausalLM
from areal_torch.engines.model.self_test import self_test
from areal_torch.engines.parallel.apply import decoder_layers
from areal_torch.engines.parallel.memory import recompute_layers, use_kernels
from areal_torch.engines.parallel.plans import spread_experts, spread_matrices

CPU = torch.device("cpu")
FAMILIES = ["llama4", "llama4_text"]
pytestmark = pytest.mark.filterwarnings("ignore")


def two_models(kind="llama4_text", kernel=PACKED, seed=0, **text):
    """A plain one, and the same weights packed, without towers."""
    torch.set_num_threads(1)
    hf = tiny_model(kind, seed)
    for owner in (hf.config.get_text_config(), *positions.counting(guards.decoder_of(hf))):
        vars(owner).update({name: n for name, n in text.items() if name in vars(owner)})
    trained = copy.deepcopy(hf)
    guards.drop_towers(trained)
    guards.silence_noise(trained)
    return hf, PackedCausalLM(trained, kernel=kernel, chunk_elements=1 << 12)


# Tokens of a group's prefix, and what each of its sequences adds.
GROUPS = {
    "shorter than a chunk": ((0, (2,)), (1, (1, 2)), (0, (3,))),
    "as long as a chunk": ((0, (4,)), (2, (2, 2)), (0, (1, 4))),
    "many chunks": ((0, (70, 33)), (0, (16, 3))),
    "a prefix that ends inside a chunk": ((2, (9, 1)), (7, (12, 1, 4))),
    "a prefix that ends at a chunk's edge": ((4, (9, 1)), (8, (3, 4, 5))),
    "a prefix of many chunks": ((40, (9, 1)), (31, (70, 5, 1))),
    "a sequence that is all prefix": ((8, (0, 5)), (6, (7, 0, 0))),
}


@pytest.mark.parametrize("share", [True, False], ids=["shared", "not shared"])
@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("kind", FAMILIES)
def test_packed_when_attention_is_in_chunks_then_equals_each_sequence_alone(kind, groups, share):
    hf, model = two_models(kind)
    logprob, gradient = errors(hf, model, seed=3, given=groups, share_prefixes=share)
    assert logprob <= LOGPROB_TOLERANCE
    assert gradient <= GRADIENT_TOLERANCE


def test_packed_when_a_row_is_longer_than_a_step_of_scales_then_equals_each_sequence_alone():
    # In the published models a step has 8192 tokens: a sequence is below it, a packed row is not.
    hf, model = two_models(attention_chunk_size=64, floor_scale=64)
    logprob, gradient = errors(hf, model, seed=1, given=((5, (50,) * 6), (0, (70, 1))))
    assert logprob <= LOGPROB_TOLERANCE
    assert gradient <= GRADIENT_TOLERANCE


def test_varlen_when_attention_is_in_chunks_then_equals_each_sequence_alone():
    for groups in GROUPS.values():
        hf, model = two_models(kernel=TORCH)
        with torch_kernels():
            logprob, gradient = errors(hf, model, seed=3, given=groups)
        assert logprob <= LOGPROB_TOLERANCE
        assert gradient <= GRADIENT_TOLERANCE


@pytest.mark.parametrize("kind", FAMILIES)
def test_layout_when_it_spreads_matrices_or_experts_then_refuses_experts_that_take_every_token(
    kind,
):
    mesh = SimpleNamespace(layout="d1t2", experts=None)
    with pytest.raises(InvalidInput, match=r"Llama4For.* has experts, .*layout without t"):
        spread_matrices(tiny_model(kind, 0), mesh)
    mesh = SimpleNamespace(layout="d2e2", experts="the group")
    with pytest.raises(InvalidInput, match=r"Llama4For.* no base_model_ep_plan.* without e"):
        spread_experts(tiny_model(kind, 0), mesh)


# -- the layout ------------------------------------------------------------------------------------


def alone(q, k, v, bounds, chunk):
    """The definition, [T, heads, width]: one chunk of one sequence after another."""
    parts = []
    for begin, end in pairwise(bounds):
        for start in range(begin, end, chunk):
            q_, k_, v_ = (x[start : min(start + chunk, end)].transpose(0, 1) for x in (q, k, v))
            scores = q_ @ k_.transpose(1, 2) * q.shape[2] ** -0.5
            later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
            parts.append(scores.masked_fill(later, float("-inf")).softmax(-1) @ v_)
    return torch.cat(parts, 1).transpose(0, 1)


def attention(layer_types, chunk):
    module = torch.nn.Identity()
    module.config = SimpleNamespace(layer_types=layer_types, attention_chunk_size=chunk)
    module.layer_idx = 0
    return module


@pytest.mark.parametrize("kernel", [PACKED, TORCH])
@settings(max_examples=60, deadline=None)
@given(
    groups=st.lists(
        st.tuples(st.integers(0, 12), st.lists(st.integers(1, 9), min_size=1, max_size=4)),
        min_size=1,
        max_size=4,
    ),
    chunk=st.integers(1, 25),
    share=st.booleans(),
)
def test_attention_when_sequences_and_chunks_are_any_then_equals_the_definition(
    kernel, groups, chunk, share
):
    sequences, index, token = [], [], 0
    for group, (common, added) in enumerate(groups):
        for count in added:
            ids = [*range(1000 * group, 1000 * group + common), *range(-token - count, -token)]
            token += count
            sequences.append({"input_ids": ids, "loss_mask": [True] * len(ids)})
            index.append(group)
    batch = packing.pack(sequences, index)
    made = build_layout(batch, share_prefixes=share, buckets=kernel == PACKED, chunk=chunk)
    same = batch["input_ids"].unique(return_inverse=True)[1]  # equal ids are equal
    q, k, v = torch.randn(3, len(same), 2, 8, dtype=torch.float64)[:, same].unbind()
    computed = [x[made.computed].transpose(0, 1)[None].requires_grad_() for x in (q, k, v)]
    whole = [x.requires_grad_() for x in (q, k, v)]
    module = attention(["chunked_attention"], chunk)
    with torch_kernels():
        found, _ = attention_function(kernel)(module, *computed, None, packed_layout=made)
        expected = alone(*whole, batch["cu_seqlens"].tolist(), chunk)
        torch.testing.assert_close(found[0][made.locate], expected)
        weight = torch.randn_like(expected)
        ours = torch.autograd.grad((found[0][made.locate] * weight).sum(), computed)
    theirs = torch.autograd.grad((expected * weight).sum(), whole)
    for one, other in zip(ours, theirs, strict=True):
        summed = torch.zeros_like(one[0].transpose(0, 1)).index_add_(0, made.locate, other)
        torch.testing.assert_close(one[0].transpose(0, 1), summed)


def test_layout_when_a_prefix_has_whole_chunks_then_they_attend_once():
    prefix = list(range(8))
    ids = [[*prefix, 20], [*prefix, 30, 31], [*prefix[:6], 40]]
    batch = packing.pack([{"input_ids": i, "loss_mask": [True] * len(i)} for i in ids], [0] * 3)
    chunks = build_layout(batch, share_prefixes=True, chunk=4).chunks
    assert chunks.cu_seqlens.tolist() == [0, 4, 8, 9, 11, 14]  # the last has the prefix's 4 and 5
    assert chunks.locate.tolist() == [*range(9), 9, 10, 4, 5, 11]
    assert chunks.computed.tolist() == [*range(11), 13]
    assert chunks.shared
    assert chunks.longest == 4
    moved = build_layout(batch, share_prefixes=True, chunk=4).map(lambda x: x + 1)
    assert torch.equal(moved.chunks.locate, chunks.locate + 1)
    assert build_layout(batch, share_prefixes=True, chunk=10).chunks is None


def test_attention_when_the_layout_lacks_the_layers_chunks_then_refuses_longer_sequences():
    batch = packing.pack([{"input_ids": [1] * 9, "loss_mask": [True] * 9}])
    q = torch.zeros(1, 4, 9, 8)

    def attend(kind, size, planned):
        made = build_layout(batch, share_prefixes=False, chunk=planned)
        attention_function(PACKED)(attention([kind], size), q, q, q, None, packed_layout=made)

    attend("full_attention", 4, None)
    attend("chunked_attention", 9, None)
    attend("chunked_attention", 4, 4)
    for planned in (None, 3, 5):
        with pytest.raises(
            InvalidInput, match=r"Identity attends in chunks of 4 tokens.* 9 tokens"
        ):
            attend("chunked_attention", 4, planned)


@pytest.mark.parametrize("size", [None, 0])
def test_model_when_its_chunks_have_no_size_then_refuses(size):
    with pytest.raises(InvalidInput, match=f"chunked attention with attention_chunk_size {size}"):
        two_models(attention_chunk_size=size)


# -- planted errors --------------------------------------------------------------------------------


def boundaries_ignored(name, layout, size):
    return layout


def cut_in_the_row(layout, begins):
    size = int(torch.nonzero(begins)[1])  # the first sequence is longer
    return right(layout, torch.arange(len(begins)) % size == 0)


right = layouts._in_chunks
PLANTED = {
    "no boundaries": ("areal_torch.engines.model.attention.dispatch._chunks", boundaries_ignored),
    "boundaries of the row": (
        "areal_torch.engines.model.attention.layout._in_chunks",
        cut_in_the_row,
    ),
    "positions of the row": (
        "areal_torch.engines.model.positions._tell",
        lambda module, args, kwargs: (args, kwargs),
    ),
}
# Those of the tiny model, and those that are published, which the test's sequences never reach.
SIZES = {"tiny": {}, "published": {"attention_chunk_size": 8192, "floor_scale": 8192}}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("kind", FAMILIES)
def test_self_test_when_chunks_are_right_then_passes_and_leaves_sizes_as_they_were(kind, sizes):
    hf, model = two_models(kind, **sizes)
    found = self_test(model, CPU, torch.float32)
    assert found.difference < 1e-5
    config = model.hf.config.get_text_config()
    assert config.attention_chunk_size == hf.config.get_text_config().attention_chunk_size
    steps = [m.floor_scale for m in positions.counting(model)]
    assert steps == [config.floor_scale] * 2


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("planted", PLANTED.values(), ids=PLANTED)
def test_self_test_when_chunks_or_positions_are_wrong_then_refuses(planted, sizes):
    with patch(*planted):
        _, model = two_models(**sizes)
        with pytest.raises(InvalidInput, match=r"differ by .* nats a token"):
            self_test(model, CPU, torch.float32)


# -- the engine ------------------------------------------------------------------------------------


@pytest.fixture
def initialize():
    engines = []

    def make(folder, **options):
        options = {"dtype": "float32", "gradient_checkpointing": "none", **options}
        engine = FSDPEngine(TrainEngineConfig(path=str(folder), **options))
        engines.append(engine)
        engine.initialize()
        return engine

    yield make
    for engine in reversed(engines):
        engine.destroy()


@pytest.mark.process
def test_gradients_when_chunked_layers_are_computed_again_then_are_the_same(tmp_path, initialize):
    saved("llama4_text", tmp_path)
    batch, small = make_batch(groups=2, vocabulary=96), MicroBatchSpec(max_tokens_per_mb=70)
    expected, _ = gradients(initialize(tmp_path, mb_spec=small), batch)
    for mode in ("selective", "full", "offload"):
        engine = initialize(tmp_path, gradient_checkpointing=mode, mb_spec=small)
        found, _ = gradients(engine, batch)
        assert_gradients_close(found, expected, 1e-5)


@pytest.mark.parametrize("mode", ["none", "full"])
def test_layers_when_compiled_then_are_compiled_once_for_all_that_count_positions(
    mode, monkeypatch
):
    torch._dynamo.reset()
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function: compile_(function, backend="eager"))
    count = 20  # more than torch compiles again for one function
    config = tiny_config("llama4_text").to_dict()
    kinds = ["chunked_attention", "full_attention"] * (count // 2)
    layers = {"num_hidden_layers": count, "layer_types": kinds, "no_rope_layers": [1, 0] * 10}
    hf = Llama4ForCausalLM(Llama4TextConfig(**{**config, **layers, "moe_layers": []}))
    guards.silence_noise(hf)
    recompute_layers(hf, mode, "compile")
    model = PackedCausalLM(hf, kernel=PACKED, chunk_elements=1 << 12)
    use_kernels(hf, decoder_layers(hf), "compile", CPU)
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        assert self_test(model, CPU, torch.float32).difference < 1e-5
        for seed in (0, 1):
            batch = make_batch(seed, groups=2, vocabulary=96)
            targets = torch.nonzero(batch["loss_mask"]).flatten()
            layout = model.plan(batch, share_prefixes=True)
            model(batch, layout, targets, LogprobHead())[0].sum().backward()
