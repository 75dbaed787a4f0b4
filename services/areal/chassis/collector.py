"""Imports that the garbage collector does not slow down."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pauses the garbage collector, for a block that imports much.

    Imports only add objects, and the collector walks all of them whenever their number has grown
    by a quarter: it takes a quarter of the CPU time of importing torch and transformers. At the
    end, they count as old objects, which are not walked again soon.

    Example:
        with collector_paused():
            import transformers
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if gc.get_freeze_count() == 0:  # else what is frozen would thaw
            gc.freeze()
            gc.unfreeze()
        gc.enable()
