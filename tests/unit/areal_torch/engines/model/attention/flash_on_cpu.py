"""What flash attention computes, written out for a CPU: the kernels themselves need a GPU.

Torch's `varlen_attn` runs as on a GPU, with its gradient; only the two operators at its bottom are
these. The packages are modules with functions of the same names and arguments.
"""

import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from itertools import pairwise
from types import ModuleType

import torch

from areal_torch.engines.model.attention import trial


def attend(q, k, v, cu_seqlens, longest, scale, left, softcap=0.0):
    """[T, heads, dim]; a query sees the `left` tokens before it (-1: all) and itself."""
    assert cu_seqlens.dtype == torch.int32
    assert int(cu_seqlens.diff().max()) == longest, "the longest sequence is another"
    assert int(cu_seqlens[-1]) == len(q) == len(k) == len(v)
    assert q.shape[2] == k.shape[2] == v.shape[2] <= 256, "heads are of one width"
    assert q.shape[2] % 8 == 0
    assert q.dtype == k.dtype == v.dtype
    fold = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(fold, 1), v.repeat_interleave(fold, 1)
    parts = []
    for begin, end in pairwise(cu_seqlens.tolist()):
        scores = torch.einsum("qhd,khd->hqk", q[begin:end], k[begin:end]) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        distance = torch.arange(end - begin)[:, None] - torch.arange(end - begin)
        hidden = (distance < 0) | ((distance > left) if left >= 0 else False)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        parts.append(torch.einsum("hqk,khd->qhd", weights, v[begin:end]))
    return torch.cat(parts)


@contextmanager
def torch_kernels(attend=attend):
    """Give torch's two flash operators a CPU implementation, inside the context."""

    def forward(q, k, v, cu, cu_k, longest, _, dropout, causal, *args, **options):
        assert torch.equal(cu, cu_k)
        left, right = options["window_size_left"], options["window_size_right"]
        assert right == 0, "a causal mask"
        assert causal == (left < 0)
        assert dropout == 0.0
        out = attend(q, k, v, cu, longest, options["scale"], left).contiguous()
        lse = q.new_zeros(q.shape[1], len(q), dtype=torch.float32)
        empty = torch.zeros(2, dtype=torch.uint64)
        return out, lse, empty, empty.clone(), q.new_zeros(0)

    def backward(grad, q, k, v, out, lse, cu, cu_k, longest, *args, **options):
        def differentiate():
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            again = attend(*leaves, cu, longest, options["scale"], options["window_size_left"])
            return torch.autograd.grad(again, leaves, grad)

        # Below autograd nothing is recorded; a thread of its own begins above it.
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(differentiate).result(60)

    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", forward, "CPU")
    library.impl("_flash_attention_backward", backward, "CPU")
    try:
        yield
    finally:
        library._destroy()


def varlen_2_11(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *,
    return_aux=None, scale=None, window_size=(-1, -1),
):  # fmt: skip
    assert window_size[1] == 0
    return attend(query, key, value, cu_seq_q, max_q, scale, window_size[0])


def varlen_2_13(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *,
    return_aux=None, scale=None, window_size=(-1, -1), enable_gqa=False,
    seqused_k=None, block_table=None, num_splits=None,
):  # fmt: skip
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise ValueError("Expect query and key/value to have the same number of heads")
    return varlen_2_11(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale=scale, window_size=window_size
    )


def package(name, function):
    """A module that `find_spec` finds."""
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    module.flash_attn_varlen_func = function
    return module


def flash_2(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
    softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
):  # fmt: skip
    """As flash_attn 2.8."""
    assert causal
    assert dropout_p == 0.0
    return attend(q, k, v, cu_seqlens_q, max_seqlen_q, softmax_scale, window_size[0], softcap)


def flash_3(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None,
    seqused_k=None, softmax_scale=None, causal=False, window_size=(-1, -1),
):  # fmt: skip
    """As flash_attn_interface 3, whose early versions return the log-sum-exp as well."""
    assert causal
    left = window_size[0]
    return attend(q, k, v, cu_seqlens_q, max_seqlen_q, softmax_scale, left), None


def install_packages(monkeypatch):
    """Both packages, until the test ends."""
    for name, function in (("flash_attn", flash_2), ("flash_attn_interface", flash_3)):
        monkeypatch.setitem(sys.modules, name, package(name, function))


def pretend_gpu(monkeypatch, capability):
    """A GPU of a compute capability, on which kernels are tried with tensors of the CPU."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(trial, "_move", lambda x, device: x)
