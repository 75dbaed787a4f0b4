"""Lets `import torchvision` work beside the CPU build of torch.

The torchvision wheel is linked against CUDA, so its operators never get registered, and the import
stops at `register_fake("torchvision::nms")`. SGLang imports torchvision but calls none of its
operators for a text model: declaring the two schemas is enough. The .pth file beside this one
loads it in every interpreter of the environment, the spawned scheduler's included.

Its LoRA layers ask for pinned memory, which torch has only beside an accelerator; on a CPU ordinary
memory is the same thing.
"""

import importlib.abc
import sys


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
            for made in ("tensor", "zeros", "ones", "empty"):
                setattr(torch, made, _unpinned(getattr(torch, made)))
            torch.Tensor.pin_memory = lambda self, *_: self


sys.meta_path.insert(0, _DeclareOperators())
sys.meta_path.insert(0, _OrdinaryMemory())
