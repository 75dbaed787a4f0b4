"""`auto` takes the first kernel that computes a few tokens right, whatever torch's signature is."""

import re
import sys

import pytest
import torch
import torch.nn.attention.varlen as torch_varlen
from tests.unit.areal_torch.engines.model.attention.flash_on_cpu import (
    attend,
    flash_2,
    package,
    pretend_gpu,
    varlen_2_11,
    varlen_2_13,
)
from tests.unit.areal_torch.engines.model.test_self_test import MADE_RIGHT, wild_model

from areal.errors import CannotStart
from areal_torch.engines.model.attention import dispatch
from areal_torch.engines.model.attention.dispatch import PACKED, choose
from areal_torch.engines.model.attention.varlen import CUDNN, FLASH_2, TORCH, TORCH_REPEATED
from areal_torch.engines.model.packed import PackedCausalLM
from areal_torch.engines.model.self_test import self_test
from areal_torch.engines.model.source import load_model

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


def varlen_2_10(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, return_aux=None
):
    return attend(query, key, value, cu_seq_q, max_q, query.shape[2] ** -0.5, -1)


def varlen_2_11_of_a_strict_kernel(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *,
    return_aux=None, scale=None, window_size=(-1, -1),
):  # fmt: skip
    if key.shape[1] != query.shape[1]:
        raise RuntimeError("FlashAttention needs as many heads\nof keys as of queries")
    return varlen_2_11(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale=scale, window_size=window_size
    )


def leaks(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=None):
    bounds = torch.tensor([0, len(query)], dtype=torch.int32)
    return attend(query, key, value, bounds, len(query), scale, window_size[0])


def has_no_backward(q, k, v, bounds, _, longest, __, *, scale=None, window_size=None):
    out = attend(q, k, v, bounds, longest, scale, window_size[0])
    out.register_hook(lambda gradient: torch.ops.aten.no_such_kernel)
    return out


@pytest.fixture
def log(monkeypatch):
    lines = []

    class Log:
        def __getattr__(self, level):
            return lambda event, **fields: lines.append({"level": level, "event": event, **fields})

    monkeypatch.setattr(dispatch, "get_logger", lambda _: Log())
    return lines


def model_of(folder, kind="qwen3", **options):
    wild_model(folder, kind, **{"head_dim": 8, **options})
    return load_model(str(folder), torch.bfloat16, from_scratch=False, seed=0)


@pytest.mark.parametrize(
    ("stub", "kernel", "reasons"),
    [
        (varlen_2_10, PACKED, {TORCH: "varlen_attn of torch .* has no argument scale and no win"}),
        (varlen_2_11, TORCH, {}),
        (
            varlen_2_11_of_a_strict_kernel,
            TORCH_REPEATED,
            {TORCH: "RuntimeError, FlashAttention needs as many heads of keys"},
        ),
        (varlen_2_13, TORCH, {}),
        (leaks, PACKED, {TORCH: r"its output differs from plain attention by \d+\.\d%"}),
        (has_no_backward, PACKED, {TORCH: "AttributeError, .*no_such_kernel"}),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_auto_when_torch_has_another_varlen_attn_then_ends_in_a_kernel_that_works(
    tmp_path, monkeypatch, log, stub, kernel, reasons
):
    pretend_gpu(monkeypatch, (9, 0))
    monkeypatch.setattr(torch_varlen, "varlen_attn", stub)
    hf = model_of(tmp_path, "gemma3_text", sliding_window=7)  # windows, and keys for two heads
    assert choose(hf, "auto", GPU, torch.bfloat16) == kernel
    warned = {line["kernel"]: line["reason"] for line in log if line["level"] == "warning"}
    for name, reason in reasons.items():
        assert re.search(reason, warned[name])
        assert "\n" not in warned[name]
    assert all(torch.__version__ in str(line.get("versions", torch.__version__)) for line in log)
    assert TORCH in warned or not reasons
    model = PackedCausalLM(hf, kernel=kernel, chunk_elements=1 << 20)
    assert self_test(model, CPU, torch.bfloat16).attention == kernel


def test_auto_when_every_head_has_its_own_keys_then_repeats_nothing(tmp_path, monkeypatch, log):
    pretend_gpu(monkeypatch, (9, 0))
    monkeypatch.setattr(torch_varlen, "varlen_attn", leaks)
    hf = model_of(tmp_path, "deepseek_v3", **MADE_RIGHT["deepseek_v3"])
    assert choose(hf, "auto", GPU, torch.bfloat16) == PACKED
    assert [line["kernel"] for line in log if line["level"] == "warning"] == [CUDNN, TORCH]
    passed_over = log[-1]["passed_over"]
    assert "nothing to repeat" in passed_over[TORCH_REPEATED]
    assert passed_over[FLASH_2] == "the package flash_attn is not installed"


def test_auto_when_a_package_lacks_an_argument_then_takes_torchs_kernel(tmp_path, monkeypatch, log):
    def flash_2_of_another_version(q, k, v, cu_q, cu_k, longest_q, longest_k, causal=False):
        raise AssertionError("never called")

    pretend_gpu(monkeypatch, (8, 0))
    monkeypatch.setattr(torch_varlen, "varlen_attn", varlen_2_11)
    old = package("flash_attn", flash_2_of_another_version)
    monkeypatch.setitem(sys.modules, "flash_attn", old)
    assert choose(model_of(tmp_path), "auto", GPU, torch.bfloat16) == TORCH
    (line,) = (line for line in log if line["level"] == "warning")
    assert line["kernel"] == FLASH_2
    assert "unexpected keyword argument" in line["reason"]


@pytest.mark.parametrize(
    ("stub", "why"),
    [
        (varlen_2_10, "varlen_attn of torch .* has no argument scale"),
        (varlen_2_11_of_a_strict_kernel, "RuntimeError, FlashAttention needs as many heads of"),
        (leaks, "its output differs from plain attention"),
    ],
)
def test_choose_when_a_named_kernel_does_not_work_then_one_line_and_no_fallback(
    tmp_path, monkeypatch, log, stub, why
):
    pretend_gpu(monkeypatch, (9, 0))
    monkeypatch.setattr(torch_varlen, "varlen_attn", stub)
    named = rf"attn_impl=varlen does not work on cuda:0 with torch \S+, transformers \S+: {why}"
    with pytest.raises(CannotStart, match=named) as refused:
        choose(model_of(tmp_path), "varlen", GPU, torch.bfloat16)
    assert "\n" not in str(refused.value)
    assert not log


def test_auto_when_no_kernel_works_then_one_line_names_each(tmp_path, monkeypatch, log):
    def broken(*_, **__):
        raise RuntimeError("CUDA error: no kernel image is available")

    pretend_gpu(monkeypatch, (9, 0))
    monkeypatch.setattr(torch_varlen, "varlen_attn", leaks)
    monkeypatch.setattr(dispatch, "packed_attention", broken)
    with pytest.raises(CannotStart, match="no attention kernel works on cuda:0") as refused:
        choose(model_of(tmp_path), "auto", GPU, torch.bfloat16)
    assert "packed: RuntimeError, CUDA error: no kernel image" in str(refused.value)
    assert "varlen: its output differs" in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("rank", [0, 1])
def test_auto_when_a_kernel_fails_on_another_rank_only_then_this_rank_passes_it_over_too(
    tmp_path, monkeypatch, log, rank
):
    pretend_gpu(monkeypatch, (9, 0))
    monkeypatch.setattr(torch_varlen, "varlen_attn", varlen_2_13)
    hf, asked = model_of(tmp_path), []

    def all_reduce(flags, op):  # the other rank has no kernel but `packed`
        asked.append(flags.tolist())
        if len(asked) < len(dispatch._PREFERRED):
            flags[0] = 1

    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: rank)
    monkeypatch.setattr("torch.distributed.all_reduce", all_reduce)
    assert choose(hf, "auto", GPU, torch.bfloat16) == PACKED
    assert len(asked) == len(dispatch._PREFERRED)
    assert log[-1]["passed_over"][TORCH] == "it does not work on another rank"


def test_trial_when_scores_are_capped_then_tries_with_the_cap(tmp_path, monkeypatch, log):
    def ignores_caps(q, k, v, cu_q, cu_k, longest, *others, softcap=0.0, **options):
        return flash_2(q, k, v, cu_q, cu_k, longest, *others, **options)

    pretend_gpu(monkeypatch, (9, 0))
    hf = model_of(tmp_path, "gemma2", **MADE_RIGHT["gemma2"])
    modules = sys.modules
    monkeypatch.setitem(modules, "flash_attn", package("flash_attn", flash_2))
    assert choose(hf, "auto", GPU, torch.bfloat16) == FLASH_2
    monkeypatch.setitem(modules, "flash_attn", package("flash_attn", ignores_caps))
    assert choose(hf, "auto", GPU, torch.bfloat16) == PACKED


@pytest.mark.parametrize("error", [TypeError, AttributeError, ImportError, NotImplementedError])
def test_self_test_when_a_version_lacks_something_then_names_kernel_and_versions(
    tmp_path, monkeypatch, error
):
    hf = model_of(tmp_path)
    model = PackedCausalLM(hf, kernel=PACKED, chunk_elements=1 << 20)

    def forward(*_, **__):
        raise error("got an unexpected\nkeyword argument 'enable_gqa'")

    monkeypatch.setattr(hf.model.layers[0].self_attn, "forward", forward)
    named = (
        rf"model Qwen3ForCausalLM does not run with packed attention on cpu with torch \S+, "
        rf"transformers \S+: {error.__name__}, got an unexpected keyword argument 'enable_gqa'; "
        r"expected torch 2\.11 to .*, transformers 5\.17 to .*, or another attn_impl"
    )
    with pytest.raises(CannotStart, match=named) as refused:
        self_test(model, CPU, torch.bfloat16)
    assert "choose another model" not in str(refused.value)
    assert "\n" not in str(refused.value)
