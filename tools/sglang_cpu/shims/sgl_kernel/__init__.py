"""Stands in for SGLang's compiled kernels, which exist for CUDA (and for CPUs with AMX) only.

SGLang imports names from here at the top of many modules and, on a CPU without AMX, calls plain
torch instead. So every name exists, and says what is wrong when it is called after all.
"""

import torch


def assign_req_to_token_pool_cpu(
    req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, *_args, **_kwargs
):
    """The one kernel without a plain-torch fallback: writes cache slots into the request table."""
    taken = 0
    rows = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    for row, start, end in rows:
        slots = out_cache_loc[taken : taken + end - start]
        req_to_token[row, start:end] = slots.to(req_to_token.dtype)
        taken += end - start


def __getattr__(name):
    return _missing(name)


def _missing(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_args, **_kwargs):
        raise NotImplementedError(f"sgl_kernel.{name}: not in a CPU-only environment")

    missing.__name__ = name
    return missing


# Qwen3.5's file takes these when it is imported, also for other models of Qwen. Of other operators
# SGLang asks first whether they exist.
for _name in (
    "fused_sigmoid_mul_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
):
    setattr(torch.ops.sgl_kernel, _name, _missing(_name))
