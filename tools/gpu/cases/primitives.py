"""Whether the operations that the trainer relies on exist on this GPU, and are right."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from tools.gpu.cases import Skipped
from tools.gpu.models import device, timed
from torch import Tensor

from areal_torch.algorithms import packing
from areal_torch.engines.model.attention.layout import build_layout
from areal_torch.engines.model.attention.packed import packed_attention
from areal_torch.engines.model.attention.varlen import (
    CUDNN,
    CUDNN_FROM,
    TORCH,
    bind,
    varlen_attention,
)
from areal_torch.engines.parallel.mesh import join_process_group


def measure(setting: dict[str, Any], miniature: bool) -> dict[str, Any]:
    """Relative errors against float64, GB/s, or just that the operation works."""
    return _CHECKS[setting["of"]](setting, miniature)


def _attention(setting: dict[str, Any], miniature: bool) -> dict[str, Any]:
    """Torch's kernel forward and backward; on a CPU the packed one."""
    heads, kv_heads = map(int, setting["heads"].split("/"))
    prompt = list(range(40))
    rows = [{"input_ids": [*prompt, 100 + i, *range(90 * i)]} for i in (0, 1, 2)]
    batch = {key: x.to(device()) for key, x in packing.pack(rows, [0, 0, 0]).items()}
    shared = setting.get("shared", False)
    # The float64 reference is another kernel, over every token.
    layout = build_layout(batch, share_prefixes=shared, buckets=miniature)
    whole = build_layout(batch, share_prefixes=False, buckets=True)
    window, scale = setting.get("window"), setting["width"] ** -0.5
    dtype = torch.float32 if miniature else torch.bfloat16
    torch.manual_seed(0)
    exact = [
        torch.randn(len(layout.computed), n, setting["width"], dtype=dtype, device=device())
        for n in (heads, kv_heads, kv_heads)
    ]
    doubles = [x.double().requires_grad_() for x in exact]
    narrow = [x.clone().requires_grad_() for x in exact]
    everywhere = [x.index_select(0, layout.locate) for x in doubles] if shared else doubles
    truth = packed_attention(*everywhere, whole, scale, window)
    truth = truth.index_select(0, layout.computed) if shared else truth
    if miniature:
        found = packed_attention(*narrow, layout, scale, window)
    else:
        found = varlen_attention(bind(TORCH), *narrow, layout, scale, window)
    torch.autograd.backward(truth.square().sum())
    torch.autograd.backward(found.square().sum())
    return {
        "forward": _apart(found, truth),
        "backward": max(_apart(a.grad, b.grad) for a, b in zip(narrow, doubles, strict=True)),
    }


def _race(setting: dict[str, Any], miniature: bool) -> dict[str, Any]:
    """TFLOP/s of one causal sequence, forward and backward: torch's flash attention, and cuDNN."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    _need_gpu()
    tokens, width = setting["tokens"], setting["width"]
    heads, kv_heads = map(int, setting["heads"].split("/"))
    q, k, v = (_narrow(tokens, n, width).requires_grad_() for n in (heads, kv_heads, kv_heads))
    batch = packing.pack([{"input_ids": [0] * tokens}])
    batch = {key: x.to(device()) for key, x in batch.items()}
    layout, call = build_layout(batch, share_prefixes=False, buckets=False), bind(TORCH)

    def varlen(_: int) -> None:
        out = varlen_attention(call, q, k, v, layout, width**-0.5, None)
        torch.autograd.backward(out.float().sum())

    def cudnn(_: int) -> None:
        rows = (x.transpose(0, 1)[None] for x in (q, k, v))
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            out = scaled_dot_product_attention(*rows, is_causal=True, enable_gqa=True)
        torch.autograd.backward(out.float().sum())

    operations = 7 * tokens**2 * heads * width
    rates = {}
    for name, run in (("varlen", varlen), ("cudnn", cudnn)):
        try:
            rates[name] = round(operations / timed(run)[0] / 1e12, 1)
        except RuntimeError as error:
            rates[name] = f"no: {str(error).splitlines()[0][:80]}"
    return rates


def _long(setting: dict[str, Any], miniature: bool) -> dict[str, Any]:
    """What differs between cuDNN for long sequences and torch's kernel, which are both 16 bits."""
    _need_gpu()
    heads, kv_heads = map(int, setting["heads"].split("/"))
    lengths = (300, CUDNN_FROM + 700, 40, CUDNN_FROM)
    batch = packing.pack([{"input_ids": [0] * n} for n in lengths])
    batch = {key: x.to(device()) for key, x in batch.items()}
    layout = build_layout(batch, share_prefixes=False, buckets=False)
    exact = [_narrow(sum(lengths), n, setting["width"]) for n in (heads, kv_heads, kv_heads)]
    pull = _narrow(sum(lengths), heads, setting["width"])
    results = []
    for kernel in (CUDNN, TORCH):
        rows = [x.clone().requires_grad_() for x in exact]
        out = varlen_attention(bind(kernel), *rows, layout, setting["width"] ** -0.5, None)
        torch.autograd.backward(out, pull)
        results.append([out, *(x.grad for x in rows)])
    parts = zip(("forward", "queries", "keys", "values"), *results, strict=True)
    return {name: _apart(found, truth) for name, found, truth in parts}


def _mm(setting: dict[str, Any], miniature: bool) -> dict[str, Any]:
    _need_gpu()
    a, b = _narrow(256, 512), _narrow(512, 128)
    found = torch.mm(a, b, out_dtype=torch.float32)
    return {"error": _apart(found, a.double() @ b.double())}


def _addmm(setting: dict[str, Any], miniature: bool) -> dict[str, Any]:
    _need_gpu()
    a, b = _narrow(256, 512), _narrow(512, 128)
    total = torch.randn(256, 128, device=device())
    truth = total.double() + a.double() @ b.double()
    torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    return {"error": _apart(total, truth)}


def _adamw(setting: dict[str, Any], miniature: bool) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    owned = join_process_group(device(), 60)
    try:
        mesh = init_device_mesh(device().type, (1,))
        whole = torch.ones(64, 64, device=device())
        spread = torch.nn.Parameter(distribute_tensor(whole.clone(), mesh, [Shard(0)]))
        plain = torch.nn.Parameter(whole.clone())
        for parameter in (spread, plain):
            parameter.grad = torch.full_like(parameter, 0.5)
            torch.optim.AdamW([parameter], lr=0.1, fused=parameter is spread).step()
        return {"error": _apart(spread.full_tensor(), plain)}
    finally:
        if owned:
            dist.destroy_process_group()


def _foreach(setting: dict[str, Any], miniature: bool) -> dict[str, Any]:
    """The factor stays on the GPU, so nothing waits for it."""
    parts = [torch.ones(1000, device=device()) for _ in range(10)]
    torch._foreach_mul_(parts, torch.tensor(0.5, device=device()))
    return {"error": _apart(parts[-1], torch.full((1000,), 0.5))}


def _pinned(setting: dict[str, Any], miniature: bool) -> dict[str, Any]:
    """GB/s when a copy to the host overlaps with one to the GPU."""
    _need_gpu()
    count = 1 << 28
    here = [torch.empty(count, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    there = [torch.empty(count, dtype=torch.uint8, device=device()) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]

    def both(_: int) -> None:
        with torch.cuda.stream(streams[0]):
            here[0].copy_(there[0], non_blocking=True)
        with torch.cuda.stream(streams[1]):
            there[1].copy_(here[1], non_blocking=True)
        for stream in streams:
            torch.cuda.current_stream().wait_stream(stream)

    return {"gb_s": round(2 * count / timed(both)[0] / 1e9, 2)}


def _selective(setting: dict[str, Any], miniature: bool) -> dict[str, Any]:
    """How often a backward pass runs attention again; 0 is wanted."""
    from torch.profiler import ProfilerActivity, profile
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

    from areal_torch.engines.parallel.memory import _policy

    _need_gpu()
    batch = packing.pack([{"input_ids": [0] * 64}])
    batch = {key: x.to(device()) for key, x in batch.items()}
    layout = build_layout(batch, share_prefixes=False, buckets=False)
    q, call = _narrow(64, 4, 64).requires_grad_(), bind(TORCH)

    def attend(x: Tensor) -> Tensor:
        return varlen_attention(call, x, x, x, layout, 0.125, None)

    kept = checkpoint(
        attend,
        q,
        use_reentrant=False,
        context_fn=lambda: create_selective_checkpoint_contexts(_policy),
    )
    with profile(activities=[ProfilerActivity.CPU]) as ran:
        torch.autograd.backward(kept.float().sum())
    counts = {event.key: event.count for event in ran.key_averages()}
    return {"again": counts.get("torch_attn::_varlen_attn", 0)}


def _grouped(setting: dict[str, Any], miniature: bool) -> dict[str, Any]:
    _need_gpu()
    rows, weights = _narrow(64, 32), _narrow(4, 32, 48)
    ends = torch.tensor([16, 32, 48, 64], dtype=torch.int32, device=device())
    found = torch._grouped_mm(rows, weights, offs=ends)
    truth = torch.cat([rows[16 * i : 16 * i + 16].double() @ weights[i].double() for i in range(4)])
    return {"error": _apart(found, truth)}


def _nccl(setting: dict[str, Any], miniature: bool) -> dict[str, Any]:
    """A group of one, built as weight transfers build theirs."""
    _need_gpu()
    options = dist.ProcessGroupNCCL.Options()
    group = dist.ProcessGroupNCCL(dist.HashStore(), 0, 1, options)
    value = torch.ones(8, device=device())
    group.allreduce([value]).wait()
    torch.cuda.synchronize()
    return {"sum": float(value.sum())}


def _need_gpu() -> None:
    if not torch.cuda.is_available():
        raise Skipped("a GPU")


def _narrow(*shape: int) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(*shape, device=device(), dtype=torch.bfloat16)


def _apart(found: Tensor, truth: Tensor) -> float:
    """Largest difference over the largest value."""
    wide, exact = found.detach().double().cpu(), truth.detach().double().cpu()
    return float(f"{float((wide - exact).abs().max() / exact.abs().max()):.2g}")


_CHECKS = {
    "attention": _attention,
    "race": _race,
    "long": _long,
    "mm_out_dtype": _mm,
    "addmm_out_dtype": _addmm,
    "adamw_dtensor": _adamw,
    "foreach_mul": _foreach,
    "pinned_copies": _pinned,
    "selective_keeps_attention": _selective,
    "grouped_mm": _grouped,
    "nccl": _nccl,
}
