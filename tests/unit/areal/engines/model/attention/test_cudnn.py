"""`varlen_cudnn` with torch's two cuDNN operators computed on the CPU, under their own names."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.areal.engines.model.attention.flash_on_cpu import attend, pretend_gpu
from tests.unit.areal.engines.model.test_self_test import wild_model

from areal.engines.model.attention.dispatch import choose
from areal.engines.model.attention.varlen import CUDNN, TORCH
from areal.engines.model.packed import PackedCausalLM
from areal.engines.model.self_test import self_test
from areal.engines.model.source import load_model
from areal.errors import CannotStart, InvalidInput

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


def forward(
    query: Any, key: Any, value: Any, attn_bias: Any, cum_seq_q: Any, cum_seq_k: Any, max_q: int,
    max_k: int, compute_log_sumexp: bool, dropout_p: float = 0.0, is_causal: bool = False,
    return_debug_mask: bool = False, *, scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    assert attn_bias is None
    assert compute_log_sumexp
    assert is_causal
    assert not return_debug_mask
    out = attend(query, key, value, cum_seq_q, max_q, scale, -1)
    rest = torch.zeros(3), torch.empty(0), torch.empty(0), max_q, max_k
    return out, *rest, torch.tensor(7), torch.tensor(8), torch.empty(0)


def backward(
    grad_out: Any, query: Any, key: Any, value: Any, out: Any, logsumexp: Any, philox_seed: Any,
    philox_offset: Any, attn_bias: Any, cum_seq_q: Any, cum_seq_k: Any, max_q: int, max_k: int,
    dropout_p: float, is_causal: bool, *, scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    assert (logsumexp.numel(), int(philox_seed), int(philox_offset)) == (3, 7, 8)
    assert attn_bias is None  # a tensor, even an empty one, is taken for a bias
    assert is_causal
    assert grad_out.is_contiguous()
    # Autograd is off inside an operator, so the gradients are the formula's.
    found: list[list[torch.Tensor]] = [[], [], []]
    fold = query.shape[1] // key.shape[1]
    for begin, end in pairwise(cum_seq_q.tolist()):
        q, k, v, grad = (
            x[begin:end].transpose(0, 1).double() for x in (query, key, value, grad_out)
        )
        k, v = (x.repeat_interleave(fold, 0) for x in (k, v))
        hidden = torch.ones(end - begin, end - begin).triu(1).bool()
        p = (q @ k.mT * scale).masked_fill(hidden, -torch.inf).softmax(-1)
        of_p = grad @ v.mT
        of_scores = p * (of_p - (of_p * p).sum(-1, keepdim=True)) * scale
        of_k, of_v = of_scores.mT @ q, p.mT @ grad
        of_k, of_v = (x.unflatten(0, (-1, fold)).sum(1) for x in (of_k, of_v))
        for rows, of in zip(found, (of_scores @ k, of_k, of_v), strict=True):
            rows.append(of.transpose(0, 1).to(query.dtype))
    return tuple(map(torch.cat, found))


def without_gradients(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
    return tuple(torch.zeros_like(gradient) for gradient in backward(*args, **kwargs))


@pytest.fixture
def operators(request: pytest.FixtureRequest) -> Iterator[None]:
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_cudnn_attention_forward", forward, "CPU")
        library.impl("_cudnn_attention_backward", getattr(request, "param", backward), "CPU")
        yield


def model_of(folder: Path, kind: str = "qwen3", **options: Any) -> Any:
    wild_model(folder, kind, **{"head_dim": 8, **options})
    return load_model(str(folder), torch.bfloat16, from_scratch=False, seed=0)


def test_cudnn_when_it_is_named_then_it_computes_what_the_model_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operators: None
) -> None:
    pretend_gpu(monkeypatch, (9, 0))
    hf = model_of(tmp_path)
    assert choose(hf, CUDNN, GPU, torch.bfloat16) == CUDNN
    model = PackedCausalLM(hf, kernel=CUDNN, chunk_elements=1 << 20)
    assert self_test(model, CPU, torch.bfloat16).attention == CUDNN


@pytest.mark.parametrize("operators", [without_gradients], indirect=True)
def test_cudnn_when_its_gradients_are_wrong_then_it_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operators: None
) -> None:
    pretend_gpu(monkeypatch, (9, 0))
    with pytest.raises(
        CannotStart, match=r"varlen_cudnn does not work on cuda:0 .*differs from plain"
    ):
        choose(model_of(tmp_path), CUDNN, GPU, torch.bfloat16)


def test_cudnn_when_the_model_has_sliding_windows_then_one_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_gpu(monkeypatch, (9, 0))
    hf = model_of(tmp_path, "gemma3_text", sliding_window=7)
    with pytest.raises(InvalidInput, match=r"has sliding windows; expected attn_impl"):
        choose(hf, CUDNN, GPU, torch.bfloat16)


def test_auto_when_cudnn_works_then_it_is_still_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operators: None
) -> None:
    pretend_gpu(monkeypatch, (9, 0))
    import torch.nn.attention.varlen as torch_varlen

    def varlen_2_11(q, k, v, bounds, _, longest, __, *, scale=None, window_size=None):
        return attend(q, k, v, bounds, longest, scale, -1)

    monkeypatch.setattr(torch_varlen, "varlen_attn", varlen_2_11)
    assert choose(model_of(tmp_path), "auto", GPU, torch.bfloat16) == TORCH
