"""Lets SGLang run beside the CPU build of torch, where what it imports or allocates is for CUDA.

The torchvision wheel is linked against CUDA, so its operators never get registered, and the import
stops at `register_fake("torchvision::nms")`. SGLang imports torchvision but calls none of its
operators for a text model: declaring the two schemas is enough.

Its LoRA layers ask for pinned memory, which torch has only beside an accelerator. With
`--enable-return-routed-experts`, it registers a buffer in host memory with CUDA. On a CPU, ordinary
memory serves for both.

The .pth file beside this one loads it in every interpreter of the environment, the spawned
scheduler's included.
"""

import importlib.abc
import importlib.machinery
import sys

_ALLOCATES = "sglang.srt.mem_cache.pool_host.common"


class _DeclareOperators(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            library = torch.library.Library("torchvision", "DEF")
            for operator in ("nms", "qnms"):
                library.define(
                    f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                )
            torch.areal_torchvision_library = library  # lives as long as torch


def _unpinned(make):
    def made(*args, pin_memory=False, **given):
        return make(*args, **given)

    return made


class _OrdinaryMemory(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "sglang.srt.lora":
            sys.meta_path.remove(self)
            import torch

            if torch.cuda.is_available():
                return
            import torch.jit._builtins as builtins

            for makes in ("tensor", "zeros", "ones", "empty"):
                made = _unpinned(getattr(torch, makes))
                setattr(torch, makes, made)
                builtins._register_builtin(made, f"aten::{makes}")  # scripted functions call them
            torch.Tensor.pin_memory = lambda self, *_: self


class _PlainBuffer(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == _ALLOCATES:
            sys.meta_path.remove(self)
            spec = importlib.machinery.PathFinder.find_spec(name, path)
            execute = spec.loader.exec_module

            def exec_module(module):
                execute(module)
                module.ALLOC_MEMORY_FUNCS["cpu"] = _allocate

            spec.loader.exec_module = exec_module
            return spec
        return None


def _allocate(dims, dtype, device, **_):
    import torch

    return torch.empty(dims, dtype=dtype, device=device)


sys.meta_path[:0] = [_DeclareOperators(), _OrdinaryMemory(), _PlainBuffer()]
