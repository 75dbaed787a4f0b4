"""The trainer on a GPU that is not there: fake tensors on `cuda` in a CPU build of torch.

    FAKE_CUDA=fake_cuda.so python -m tests.unit.areal_torch.engines.fake_gpu CASE

An operator that mixes devices raises, and so does one whose result depends on a value, such as
`nonzero`, except the reads that `Host` counts. Prints a JSON object.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import tempfile
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

# Before torch asks for them.
ctypes.CDLL(os.environ["FAKE_CUDA"], mode=ctypes.RTLD_GLOBAL)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch._subclasses.fake_tensor import (  # noqa: E402
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

from areal.config.allocation import Layout  # noqa: E402
from areal.config.training import LoraConfig, MicroBatchSpec, TrainEngineConfig  # noqa: E402
from areal_torch.algorithms import packing  # noqa: E402
from areal_torch.algorithms.losses import sft_loss  # noqa: E402
from areal_torch.engines import optimizer, step  # noqa: E402
from areal_torch.engines.model import heads, lora, source  # noqa: E402
from areal_torch.engines.model.attention import dispatch  # noqa: E402
from areal_torch.engines.model.packed import PackedCausalLM  # noqa: E402
from areal_torch.engines.parallel import memory  # noqa: E402
from areal_torch.engines.parallel.apply import parallelize, resolve_precision  # noqa: E402
from areal_torch.engines.parallel.mesh import make_mesh  # noqa: E402

SHAPES = Path(__file__).parents[4] / "tools/gpu/shapes"
VOCABULARY = 151_936
GPU = torch.device("cuda", 0)
aten = torch.ops.aten
# They read or write single elements of their largest operand.
SPARSE = (aten.gather, aten.scatter_, aten.scatter_add_)
# logsumexp is amax, a difference, exp_ and a sum: four reads and two writes of its operand.
PASSES = {aten.logsumexp: 6}
MAKE = (aten.empty, aten.empty_like, aten.new_empty)


class Traffic(TorchDispatchMode):
    """Adds up the bytes of the tensors that each operator reads and writes; views move nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = operator(*args, **(kwargs or {}))
        packet = operator.overloadpacket
        if operator.namespace != "aten" or operator.is_view or packet in MAKE:
            return result
        sizes = [t.nbytes for t in tree_leaves((args, result)) if isinstance(t, torch.Tensor)]
        if packet in SPARSE:
            sizes = [size for size in sizes if size < max(sizes)]
        self.bytes += sum(sizes) * PASSES.get(packet, 1)
        return result


class Host(TorchDispatchMode):
    """Computes on the host with real tensors, and counts where the host waits for the GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.pop("pin_memory", False):  # to copy to: its content is not known, either
            return operator(*args, **kwargs)
        leaves = tree_leaves((args, kwargs))
        fake = [leaf for leaf in leaves if isinstance(leaf, FakeTensor)]
        to = next((leaf for leaf in leaves if isinstance(leaf, torch.device)), None)
        if not fake and (to is None or to.type == "cpu"):
            with unset_fake_temporarily():
                return operator(*args, **kwargs)
        packet = operator.overloadpacket
        if not fake and packet is aten._to_copy:  # of pinned memory: the host does not wait
            return torch.empty(args[0].shape, dtype=args[0].dtype, device=to)
        read = packet in (aten._local_scalar_dense, aten.is_nonzero)
        copied = packet is aten._to_copy and to is not None and to.type == "cpu"
        written = packet is aten.copy_ and args[0].device.type == "cpu"
        beside = kwargs.get("non_blocking") or (written and args[2:] == (True,))
        if beside or not (read or copied or written):
            return operator(*args, **kwargs)
        if fake[-1].device == GPU:
            self.waits.append(str(operator))
        if written:
            return args[0]
        with unset_fake_temporarily():  # numbers are 1; questions, such as for NaN, are denied
            dtype = kwargs.get("dtype") or fake[0].dtype
            value = torch.full(fake[0].shape, dtype != torch.bool, dtype=dtype)
            return value.item() if read else value


class Event:
    """A point of a stream that has always passed."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, *_: Any) -> None: ...

    def wait(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, _: Any) -> float:
        return 1.0


class Stream:
    """The only one."""

    device, stream_id, device_index, device_type, cuda_stream = GPU, 0, 0, 1, 0

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_event(self, *_: Any) -> None: ...

    def wait_stream(self, *_: Any) -> None: ...

    def record_event(self, *_: Any) -> Event:
        return Event()

    def synchronize(self) -> None: ...


def waited(*_: Any, **__: Any) -> None:
    raise AssertionError("the host waits for the whole device")


def driver() -> ExitStack:
    """torch.cuda as it is on an H100, without a device."""
    names = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda _: None,
        "synchronize": waited,
        "Event": Event,
        "Stream": Stream,
        "current_stream": lambda *_: Stream(),
        "default_stream": lambda *_: Stream(),
        "stream": lambda _: nullcontext(),
        "get_device_capability": lambda *_: (9, 0),
        "get_device_name": lambda *_: "NVIDIA H100 80GB HBM3",
        "mem_get_info": lambda *_: (79 << 30, 80 << 30),
        "max_memory_allocated": lambda *_: 0,
        "_lazy_init": lambda: None,
    }
    stack = ExitStack()
    for name, value in names.items():
        stack.enter_context(mock.patch.object(torch.cuda, name, value))
    private = {"_cuda_getDevice": lambda: 0, "_get_accelerator": lambda *_: torch.device("cuda")}
    for name, value in private.items():
        stack.enter_context(mock.patch.object(torch._C, name, value, create=True))
    stack.enter_context(mock.patch.object(torch.Tensor, "pin_memory", lambda tensor: tensor))
    return stack


class Context(SimpleNamespace):
    """What autograd passes to a function."""

    needs_input_grad = (True, True, False, False, False, False)

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def mark_non_differentiable(self, *_: Any) -> None: ...


def head_traffic(widths: list[int], tokens: int, rows: int) -> dict[int, float]:
    """Bytes per loss token, forward and backward, of a bfloat16 head of each width."""
    return {width: _head_traffic(width, tokens, rows) for width in widths}


def _head_traffic(width: int, tokens: int, rows: int) -> float:
    ctx, transform = Context(), heads._Transform(1.0, None, 1.0)
    with FakeTensorMode(), Traffic() as traffic:
        hidden = torch.empty(tokens, width, dtype=torch.bfloat16, device=GPU)
        weight = torch.empty(VOCABULARY, width, dtype=torch.bfloat16, device=GPU)
        labels = torch.empty(tokens, dtype=torch.int64, device=GPU)
        logprobs, entropies = heads._LinearLogprob.forward(
            ctx, hidden, weight, None, labels, transform, rows
        )
        found = heads._LinearLogprob.backward(ctx, torch.empty_like(logprobs), entropies)
    for gradient, of in zip(found, (hidden, weight), strict=False):
        assert (gradient.dtype, gradient.device, gradient.shape) == (of.dtype, of.device, of.shape)
    return traffic.bytes / tokens


def train_step(
    shape: str,
    layout: str,
    kernel: str = "auto",
    mode: str = "none",
    moments: str = "float32",
    *also: str,
) -> dict[str, Any]:
    """Where the host waits in each of two train steps of two micro-batches, and what they say.

    Args:
        shape: Of a file in tools/gpu/shapes.
        layout: Of the ranks; this process is the first of them.
        kernel: `attn_impl`.
        mode: What layers recompute.
        moments: Dtype of the optimizer's.
        also: `lora`, `offload`.
    """
    dist.init_process_group("fake", rank=0, world_size=Layout.parse(layout).ranks)
    with tempfile.TemporaryDirectory() as folder, driver():
        config = json.loads((SHAPES / f"{shape}.json").read_text()) | {"num_hidden_layers": 2}
        (Path(folder) / "config.json").write_text(json.dumps(config))
        own = TrainEngineConfig(path=folder, layout=layout, gradient_checkpointing=mode)  # type: ignore[arg-type]
        own.mb_spec = MicroBatchSpec(max_tokens_per_mb=1024)
        own.lora = LoraConfig() if "lora" in also else None
        own.offload = "offload" in also
        assert own.optimizer is not None
        own.optimizer.moments = moments  # type: ignore[assignment]
        return _train(own, kernel)


def _train(config: TrainEngineConfig, kernel: str) -> dict[str, Any]:
    from torch.distributed.fsdp._fully_shard import _fsdp_init

    compute, master = resolve_precision(config, GPU)
    mesh = make_mesh(config.layout, GPU, 60)
    budget = memory.budget(config, mesh, GPU)
    hf = source.build(config.path, master if config.lora is None else compute)
    if config.lora is not None:
        lora.inject(hf, config.lora, master)
    memory.recompute_layers(hf, budget.mode, "eager")
    # Fake tensors have no values to try a kernel with.
    with mock.patch.object(dispatch, "_failure", return_value=None):
        chosen = dispatch.choose(hf, kernel, GPU, compute)
    model = PackedCausalLM(hf, kernel=chosen, chunk_elements=budget.chunk)
    empty = torch.empty

    def on_host(*sizes: Any, device: Any = "cpu", **options: Any) -> torch.Tensor:
        # FSDP's placeholder, made before there are fake tensors.
        place = "cpu" if torch.device(device).type == "cuda" else device
        return empty(*sizes, device=place, **options)

    with (
        mock.patch.object(torch, "empty", on_host),
        mock.patch.object(_fsdp_init, "_move_states_to_device"),
    ):
        parallelize(model, mesh, compute, master, offload=config.offload)
    rows = [{"input_ids": list(range(512)), "loss_mask": [n > 255 for n in range(512)]}] * 4
    batch = packing.pack(rows, list(range(4)))
    offloaded = sum(1 for _ in model.parameters()) if config.offload else 0
    found: dict[str, Any] = {"kernel": chosen, "waits": [], "offloaded": offloaded}
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu" if config.offload else GPU)
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = torch.empty_like(buffer, device=GPU)
        hf.tie_weights()
        train = step.TrainStep(
            model, config, GPU, mesh, sharded=True, budget=budget, total_train_steps=None
        )
        assert train.optimizer is not None
        optimizer.make_state(train.optimizer)
        for _ in range(2):
            with Host() as host:
                loss = lambda p, _, mb: sft_loss(p, mb["loss_mask"])  # noqa: E731
                train.accumulate(batch, loss, None, heads.LogprobHead())
                stats = train.apply()
            found["waits"].append(host.waits)
    dist.destroy_process_group()
    return found | {"steps": train.steps_taken, "stats": stats}


if __name__ == "__main__":
    case, *arguments = json.loads(sys.argv[1])
    print(json.dumps({"head": head_traffic, "step": train_step}[case](*arguments)))
