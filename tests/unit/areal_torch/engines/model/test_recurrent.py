"""Layers with a state or a convolution: right on packed sequences, and every leak is caught."""

import copy
import importlib
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.areal_torch.engines.train_fixtures import (
    assert_gradients_close,
    gradients,
    make_batch,
    weighted_loss,
)
from tools.gen_models import GRADIENT_TOLERANCE, LOGPROB_TOLERANCE, errors
from tools.tiny_architectures import tiny_config, tiny_model
from transformers import AutoModelForCausalLM

from areal.config.allocation import Layout
from areal.config.training import (
    LoraConfig,
    MicroBatchSpec,
    OptimizerConfig,
    TrainEngineConfig,
)
from areal.errors import CannotStart, ConfigError, InvalidInput
from areal_torch.algorithms import packing
from areal_torch.engines.fsdp import FSDPEngine
from areal_torch.engines.model import recurrent
from areal_torch.engines.model.guards import silence_noise
from areal_torch.engines.model.heads import LogprobHead
from areal_torch.engines.model.layer_types import attention_layers
from areal_torch.engines.model.packed import PackedCausalLM
from areal_torch.engines.model.self_test import self_test
from areal_torch.engines.optimizer import make_optimizer
from areal_torch.engines.parallel.apply import _check_sizes
from areal_torch.engines.perf import Work

CPU = torch.device("cpu")
# One family of each kind.
KINDS = {
    "qwen3_next": "gated delta rule",
    "kimi_linear": "gated delta rule",
    "jamba": "Mamba 1",
    "bamba": "Mamba 2",
    "lfm2": "short convolution",
    "minimax": "lightning attention",
    "deepseek_v32": "indexed attention",
    "glm_moe_dsa": "indexed attention",
}
CONVOLVING = [kind for kind in KINDS if KINDS[kind].split()[-1] != "attention"]
# The function of its module that carries the state, and the dimension of its tokens.
STATES = {
    "qwen3_next": ("torch_chunk_gated_delta_rule", 1),
    "kimi_linear": ("chunk_kimi_delta_attention", 1),
    "jamba": ("mamba_selective_scan", -1),
    "bamba": ("mamba2_chunk_scan", 1),
}
pytestmark = pytest.mark.filterwarnings("ignore")


def packed_model(kind, seed=0):
    torch.set_num_threads(1)
    hf = tiny_model(kind, seed)
    silence_noise(hf)
    return PackedCausalLM(hf, kernel="packed", chunk_elements=1 << 12)


@pytest.mark.process  # some of transformers' models compile a kernel when they are imported
@pytest.mark.parametrize("kind", KINDS)
def test_packed_when_layers_are_recurrent_then_equal_each_sequence_alone(kind):
    model = packed_model(kind)
    assert model.recurrent.kinds == [KINDS[kind]]
    logprob, gradient = errors(tiny_model(kind, 0), model, seed=3)
    assert logprob <= LOGPROB_TOLERANCE
    assert gradient <= GRADIENT_TOLERANCE


def rows_in_one(function, dim):
    """A function of rows of tokens, on dimension `dim`, that runs over one after the other."""

    def leaking(*args, **kwargs):
        first = next(a for a in args if isinstance(a, torch.Tensor))
        rows, tokens = first.shape[0], first.shape[dim]

        def joined(value):
            if not isinstance(value, torch.Tensor) or value.ndim < 3:
                return value
            return torch.cat(value.unbind(0), dim if dim < 0 else dim - 1)[None]

        out = function(*map(joined, args), **{k: joined(v) for k, v in kwargs.items()})
        whole = out[0] if isinstance(out, tuple) else out
        apart = torch.cat(whole.split(tokens, dim))
        assert len(apart) == rows
        return (apart, *out[1:]) if isinstance(out, tuple) else apart

    return leaking


def leaking_convolution(x, weight, *args, **kwargs):
    """A convolution over all rows, one after the other."""
    rows, channels, tokens = x.shape
    row = x.transpose(0, 1).reshape(1, channels, rows * tokens)
    out = conv1d(row, weight, *args, **kwargs)[:, :, : rows * tokens]
    out = out.reshape(channels, rows, tokens).transpose(0, 1)
    return torch.nn.functional.pad(out, (0, weight.shape[-1] - 1))


conv1d = torch.nn.functional.conv1d


def refused(model):
    with pytest.raises((InvalidInput, CannotStart), match=r"differ by .* nats a token"):
        self_test(model, CPU, torch.float32)


@pytest.mark.process
@pytest.mark.parametrize("kind", CONVOLVING)
def test_self_test_when_only_a_convolution_leaks_then_refuses(kind):
    model = packed_model(kind)
    with patch.object(torch.nn.functional, "conv1d", leaking_convolution):
        refused(model)


@pytest.mark.process
@pytest.mark.parametrize("kind", STATES)
def test_self_test_when_only_a_state_leaks_then_refuses(kind):
    model = packed_model(kind)
    place = importlib.import_module(type(model.hf).__module__)
    name, dim = STATES[kind]
    with patch.object(place, name, rows_in_one(getattr(place, name), dim)):
        refused(model)


@pytest.mark.process
@pytest.mark.parametrize("kind", KINDS)
def test_self_test_when_layers_run_over_the_packed_row_then_refuses(kind):
    model = packed_model(kind)
    plain = lambda forward, layout, *args, **kwargs: forward(*args, **kwargs)  # noqa: E731
    with patch.object(recurrent, "by_length", plain):
        refused(model)


@pytest.mark.process
@pytest.mark.parametrize("kind", KINDS)
def test_self_test_when_outputs_are_a_position_late_then_refuses(kind):
    model = packed_model(kind)
    right = recurrent.by_length

    def late(forward, layout, *args, **kwargs):
        out = right(forward, layout, *args, **kwargs)
        first = out[0] if isinstance(out, tuple) else out
        first = first.roll(1, dims=1)
        return (first, *out[1:]) if isinstance(out, tuple) else first

    with patch.object(recurrent, "by_length", late):
        refused(model)


@pytest.mark.process
@pytest.mark.parametrize("kind", ["qwen3_next", "bamba", "lfm2", "deepseek_v32"])  # with positions
def test_self_test_when_positions_run_on_over_the_row_then_refuses(kind):
    model = packed_model(kind)
    right = model.plan

    def running_on(batch, **options):
        layout = right(batch, **options)
        return replace(layout, position_ids=torch.arange(len(layout.position_ids)))

    with patch.object(model, "plan", running_on):
        refused(model)


class Causal(torch.nn.Module):
    """Adds up the tokens of a row so far; with `heeds`, those of its own sequence."""

    def __init__(self, heeds=True):
        super().__init__()
        self.conv1d = torch.nn.Conv1d(3, 3, 2)
        self.proj = torch.nn.Linear(3, 3)
        self.heeds = heeds

    def forward(self, hidden_states, seq_idx=None, cu_seqlens=None):
        found = self.proj(hidden_states).cumsum(1)
        if cu_seqlens is None or not self.heeds:
            return found
        starts = torch.cat([found.new_zeros(1, 1, 3), found], 1)[:, cu_seqlens.long()[:-1]]
        return found - starts[:, seq_idx[0].long()]


@settings(max_examples=60, deadline=None)
@given(
    groups=st.lists(
        st.tuples(st.integers(0, 6), st.lists(st.integers(1, 9), min_size=1, max_size=4)),
        min_size=1,
        max_size=4,
    ),
    share=st.booleans(),
    told=st.booleans(),
)
def test_layer_when_sequences_are_any_then_computes_each_alone(groups, share, told):
    sequences, index, token = [], [], 0
    for group, (common, added) in enumerate(groups):
        for count in added:
            ids = [*range(1000 * group, 1000 * group + common), *range(-token - count, -token)]
            token += count
            sequences.append({"input_ids": ids, "loss_mask": [True] * len(ids)})
            index.append(group)
    batch = packing.pack(sequences, index)
    layout = recurrent.build_layout(batch, share_prefixes=share)
    module = Causal().double()
    embedded = torch.randn(len(batch["input_ids"]), 3, dtype=torch.float64)
    embedded = embedded[batch["input_ids"].unique(return_inverse=True)[1]]  # equal ids are equal
    x = embedded[layout.computed][None]
    if told:
        found = recurrent.with_boundaries(module.forward, "cu_seqlens", layout, x)
    else:
        found = recurrent.by_length(module.forward, layout, x)
    alone = [module(embedded[None, a:b])[0] for a, b in bounds(batch["cu_seqlens"])]
    torch.testing.assert_close(found[0][layout.locate], torch.cat(alone))


def bounds(cu_seqlens):
    return zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True)


class Model(torch.nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)


class Heedless(Causal):
    def __init__(self):
        super().__init__(heeds=False)


def test_choice_when_a_kernel_ignores_boundaries_then_it_is_computed_by_length():
    model = Model(Causal(), Heedless())
    assert recurrent._Trial(model.layers[0], 3, CPU, torch.float32).difference("cu_seqlens") < 1e-5
    assert recurrent._Trial(model.layers[1], 3, CPU, torch.float32).difference("cu_seqlens") > 0.1
    heeding = recurrent._heeding(model.layers[0], 3, CPU, torch.float32, trains=True)
    assert heeding == ("cu_seqlens", "")
    argument, why = recurrent._heeding(model.layers[1], 3, CPU, torch.float32, trains=True)
    assert argument is None
    assert "differs by" in why
    assert "cu_seq_lens_q: TypeError" in why


class NoBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError("this kernel computes\nno gradients on this GPU")


class Wrong(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.flip(1)


class OnlyForward(Causal):
    def forward(self, *args, **kwargs):
        return NoBackward.apply(super().forward(*args, **kwargs))


class WrongIfTold(Causal):
    def forward(self, x, cu_seqlens=None, **kwargs):
        out = super().forward(x, cu_seqlens=cu_seqlens, **kwargs)
        return out if cu_seqlens is None else Wrong.apply(out)


def test_choice_when_a_kernel_cannot_be_trained_then_one_line_says_so_before_the_first_step():
    message = (
        r"^OnlyForward does not run on cpu: RuntimeError, this kernel computes no gradients on "
        r"this GPU; expected versions of its kernels"
    )
    with pytest.raises(CannotStart, match=message) as refusal:
        recurrent._heeding(OnlyForward(), 3, CPU, torch.float32, trains=True)
    assert "\n" not in str(refusal.value)


def test_choice_when_a_frozen_model_has_kernels_without_gradients_then_they_are_used():
    heeding = recurrent._heeding(OnlyForward(), 3, CPU, torch.float32, trains=False)
    assert heeding == ("cu_seqlens", "")


def test_choice_when_gradients_ignore_boundaries_then_it_is_computed_by_length():
    argument, why = recurrent._heeding(WrongIfTold(), 3, CPU, torch.float32, trains=True)
    assert argument is None
    assert "cu_seqlens: differs by" in why


@pytest.mark.process
@pytest.mark.parametrize("kind", [*KINDS, "qwen3_5_text", "nemotron_h", "falcon_h1", "zamba2"])
def test_choice_when_only_torch_functions_are_there_then_it_is_computed_by_length(kind):
    hf = tiny_model(kind, 0)
    width = hf.config.hidden_size
    for module in {type(m): m for _, m in recurrent.modules_of(hf)}.values():
        argument, why = recurrent._heeding(module, width, CPU, torch.float32, trains=True)
        assert argument is None
        assert any(each in why for each in ("differs by", "sequences apart", "no kernels"))


# -- the engine ------------------------------------------------------------------------------------


def saved(kind, folder):
    with torch.random.fork_rng(devices=[]):
        tiny_model(kind, 0).save_pretrained(folder)
    return folder


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


SMALL = {"mb_spec": MicroBatchSpec(max_tokens_per_mb=70)}


@pytest.mark.process
@pytest.mark.parametrize(
    "kind", ["qwen3_next", "kimi_linear", "jamba", "bamba", "lfm2", "glm_moe_dsa"]
)
def test_gradients_when_layers_are_computed_again_then_are_the_same(tmp_path, initialize, kind):
    folder, batch = saved(kind, tmp_path), make_batch(groups=2, vocabulary=96)
    expected, _ = gradients(initialize(folder, **SMALL), batch)
    for mode in ("selective", "full", "offload"):
        found, _ = gradients(initialize(folder, gradient_checkpointing=mode, **SMALL), batch)
        assert_gradients_close(found, expected, 1e-5)


@pytest.mark.process
def test_layer_when_computed_again_after_another_batch_then_has_its_own_sequences():
    model = packed_model("jamba")  # whose layers pass no keywords on
    model.hf.gradient_checkpointing_enable({"use_reentrant": False})
    model = PackedCausalLM(model.hf, kernel="packed", chunk_elements=1 << 12)
    for module in model.hf.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.training = True

    def read(seed):
        batch = make_batch(seed, groups=2, vocabulary=96)
        targets = torch.nonzero(batch["loss_mask"]).flatten()
        return model(batch, model.plan(batch, share_prefixes=True), targets, LogprobHead())[0]

    def gradient():
        found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        return found

    read(0).sum().backward()
    expected = gradient()
    first = read(0)
    read(1)
    first.sum().backward()
    assert_gradients_close(gradient(), expected, 1e-6)


@pytest.mark.process
@pytest.mark.parametrize("kind", ["qwen3_next", "bamba"])
def test_training_when_adapters_or_bfloat16_then_every_kind_of_layer_learns(
    tmp_path, initialize, kind
):
    folder, batch = saved(kind, tmp_path), make_batch(groups=2, vocabulary=96)
    adapted, _ = gradients(initialize(folder, lora=LoraConfig(rank=2)), batch)
    layers = {"qwen3_next": "in_proj_qkvz", "bamba": "in_proj"}
    assert any(layers[kind] in name and g.abs().sum() > 0 for name, g in adapted.items())
    engine = initialize(folder, dtype="bfloat16")
    assert engine.train_batch(batch, weighted_loss)["grad_norm"] > 0


@pytest.mark.process
def test_packed_when_layers_reuse_an_indexers_choice_then_equal_each_sequence_alone():
    """Among sequences of other lengths, and with more keys to choose than some sequences have."""
    torch.set_num_threads(1)
    config = tiny_config("glm_moe_dsa")
    config.indexer_types = ["full", "shared", "full", "shared"]
    config.index_topk = 9

    def made():
        torch.manual_seed(0)
        again = copy.deepcopy(config)
        hf = AutoModelForCausalLM.from_config(again, attn_implementation="eager").eval()
        with torch.no_grad():
            for parameter in hf.parameters():
                parameter.normal_(float(parameter.ndim == 1), 0.3)
        return hf

    for seed in range(3):
        model = PackedCausalLM(made(), kernel="packed", chunk_elements=1 << 12)
        logprob, gradient = errors(made(), model, seed)
        assert logprob <= LOGPROB_TOLERANCE
        assert gradient <= GRADIENT_TOLERANCE
    assert not any(p.requires_grad for n, p in model.named_parameters() if "indexer" in n)


def test_layout_when_it_shares_tokens_or_matrices_then_refuses_and_names_the_kind():
    hf = tiny_model("lfm2", 0)
    _check_sizes(hf, Layout.parse("d2s2"))
    for layout in ("d1c2", "d1t2"):
        with pytest.raises(ConfigError, match=r"Lfm2ForCausalLM .*short convolution.*without t"):
            _check_sizes(hf, Layout.parse(layout))


@pytest.mark.process
def test_work_when_layers_are_recurrent_then_counts_states_once_and_pairs_in_attention_only():
    hf = tiny_model("qwen3_next", 0)
    config = hf.config
    assert len(attention_layers(config)) == 2
    work = Work.of(hf)
    assert work.per_pair == 6 * 2 * config.num_attention_heads * config.head_dim
    state = config.linear_num_value_heads * config.linear_key_head_dim
    state *= config.linear_value_head_dim
    with patch("areal_torch.engines.perf.state_products", lambda _: 0):
        assert work.per_token - Work.of(hf).per_token == 6 * 3 * 2 * state
    assert Work.of(tiny_model("mamba", 0)).per_pair == 0


@pytest.mark.process
def test_optimizer_when_a_state_decays_by_a_matrix_then_no_weight_decay_changes_it():
    hf = tiny_model("jamba", 0)
    model = PackedCausalLM(hf, kernel="packed", chunk_elements=1 << 12)
    optimizer = make_optimizer(model, OptimizerConfig(weight_decay=0.1))
    names = {id(p): name for name, p in model.named_parameters()}
    decayed = {
        names[id(p)]
        for group in optimizer.param_groups
        if group["weight_decay"]
        for p in group["params"]
    }
    assert any(name.endswith("in_proj.weight") for name in decayed)
    assert not [name for name in decayed if "A_log" in name or name.endswith(".D")]
