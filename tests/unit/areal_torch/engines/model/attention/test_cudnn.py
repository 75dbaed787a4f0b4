"""`varlen_cudnn`, with torch's attention of a CPU in the place of cuDNN's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.areal_torch.engines.model.attention.flash_on_cpu import pretend_gpu, torch_kernels
from tests.unit.areal_torch.engines.model.test_self_test import wild_model
from torch.nn.attention import SDPBackend

from areal.errors import CannotStart, InvalidInput
from areal_torch.algorithms import packing
from areal_torch.engines.model.attention import dispatch, varlen
from areal_torch.engines.model.attention.layout import build_layout
from areal_torch.engines.model.attention.varlen import CUDNN, TORCH
from areal_torch.engines.model.packed import PackedCausalLM
from areal_torch.engines.model.self_test import self_test
from areal_torch.engines.model.source import load_model

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, ...]]]:
    """The shapes that cuDNN is asked for."""
    shapes: list[tuple[int, ...]] = []
    attend = varlen.scaled_dot_product_attention

    @contextmanager
    def only(backend: SDPBackend) -> Iterator[None]:
        assert backend == SDPBackend.CUDNN_ATTENTION
        yield

    def recorded(q: torch.Tensor, k: Any, v: Any, **options: Any) -> torch.Tensor:
        shapes.append(tuple(q.shape))
        return attend(q, k, v, **options)

    monkeypatch.setattr(varlen, "sdpa_kernel", only)
    monkeypatch.setattr(varlen, "scaled_dot_product_attention", recorded)
    with torch_kernels():
        yield shapes


def model_of(folder: Path, kind: str = "qwen3", **options: Any) -> Any:
    wild_model(folder, kind, **{"head_dim": 8, **options})
    return load_model(str(folder), torch.bfloat16, from_scratch=False, seed=0)


@pytest.mark.parametrize(("start", "called"), [(1, True), (varlen.CUDNN_FROM, False)])
def test_cudnn_when_sequences_are_long_or_short_then_it_computes_what_the_model_computes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    asked: list[tuple[int, ...]],
    start: int,
    called: bool,
) -> None:
    pretend_gpu(monkeypatch, (9, 0))
    monkeypatch.setitem(dispatch.attention_function.__kwdefaults__, "cudnn_from", start)
    hf = model_of(tmp_path)
    assert dispatch.choose(hf, CUDNN, GPU, torch.bfloat16) == CUDNN
    asked.clear()
    model = PackedCausalLM(hf, kernel=CUDNN, chunk_elements=1 << 20)
    assert self_test(model, CPU, torch.bfloat16).attention == CUDNN
    assert bool(asked) == called


def test_cudnn_when_lengths_differ_then_few_shapes_are_asked_for(
    asked: list[tuple[int, ...]],
) -> None:
    rows = [{"input_ids": [0] * n, "loss_mask": [True] * n} for n in (3, 1024, 1025)]
    layout = build_layout(packing.pack(rows), share_prefixes=False, buckets=False)
    q, kv = torch.randn(2052, 4, 8), torch.randn(2052, 2, 8)
    call = varlen.bind(CUDNN, cudnn_from=1024)
    found = varlen.varlen_attention(call, q, kv, kv, layout, 0.3, None)
    assert asked == [(1, 4, 1024, 8), (1, 4, 2048, 8)]
    with torch_kernels():
        expected = varlen.varlen_attention(varlen.bind(TORCH), q, kv, kv, layout, 0.3, None)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("lengths", [(9, 3, 5, 8), (3, 9, 8, 5), (8, 3, 9), (3, 9, 2), (8,)])
def test_cudnn_when_short_sequences_stand_between_long_ones_then_each_is_right(
    asked: list[tuple[int, ...]], lengths: tuple[int, ...]
) -> None:
    rows = [{"input_ids": [0] * n, "loss_mask": [True] * n} for n in lengths]
    layout = build_layout(packing.pack(rows), share_prefixes=False, buckets=False)
    total = sum(lengths)
    exact = [torch.randn(total, heads, 8) for heads in (4, 2, 2)]
    results = []
    for kernel in (varlen.bind(CUDNN, cudnn_from=8), varlen.bind(TORCH)):
        rows_ = [x.clone().requires_grad_() for x in exact]
        out = varlen.varlen_attention(kernel, *rows_, layout, 0.3, None)
        torch.autograd.backward(out.square().sum())
        results.append([out, *(x.grad for x in rows_)])
    assert len(asked) == sum(n >= 8 for n in lengths)
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_cudnn_when_only_its_long_sequences_are_wrong_then_it_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: list[tuple[int, ...]]
) -> None:
    pretend_gpu(monkeypatch, (9, 0))
    right = varlen.scaled_dot_product_attention

    def without_gradients(*args: Any, **options: Any) -> torch.Tensor:
        found = right(*args, **options)
        return found.detach() + 0 * found

    monkeypatch.setattr(varlen, "scaled_dot_product_attention", without_gradients)
    with pytest.raises(
        CannotStart, match=r"varlen_cudnn does not work on cuda:0 .*differs from plain"
    ):
        dispatch.choose(model_of(tmp_path), CUDNN, GPU, torch.bfloat16)


def test_cudnn_when_the_model_has_sliding_windows_then_one_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_gpu(monkeypatch, (9, 0))
    hf = model_of(tmp_path, "gemma3_text", sliding_window=7)
    with pytest.raises(InvalidInput, match=r"has sliding windows; expected attn_impl"):
        dispatch.choose(hf, CUDNN, GPU, torch.bfloat16)


@pytest.mark.parametrize(("capability", "taken"), [((9, 0), CUDNN), ((8, 0), TORCH)])
def test_auto_when_cudnn_works_then_it_is_taken_on_hopper(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    asked: list[tuple[int, ...]],
    capability: tuple[int, int],
    taken: str,
) -> None:
    pretend_gpu(monkeypatch, capability)
    assert dispatch.choose(model_of(tmp_path), "auto", GPU, torch.bfloat16) == taken
    assert bool(asked) == (taken == CUDNN)


def test_auto_when_cudnn_is_wrong_then_torch_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: list[tuple[int, ...]]
) -> None:
    pretend_gpu(monkeypatch, (9, 0))
    monkeypatch.setattr(
        varlen, "scaled_dot_product_attention", lambda q, *_, **__: torch.zeros_like(q)
    )
    assert dispatch.choose(model_of(tmp_path), "auto", GPU, torch.bfloat16) == TORCH
