"""Host memory while ranks load a model: the sum of their peaks over the size of its files.

    .venv/bin/python tools/bench/loading.py --size-mb 2048 --ranks 2

Ranks without a GPU keep their shards in host memory, here in the precision of the files, so the
bound is 1.0. Prints one JSON object. `loading` measures until the weights are loaded, and
`initialized` until the end of the self-test, which runs the model once.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
HIDDEN, VOCABULARY, SHARD = 1024, 8192, 256 << 20


def resident(field: str) -> int:
    """Bytes of VmRSS (now) or VmHWM (the most since it was reset)."""
    status = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in status if line.startswith(f"{field}:")]
    return int(line.split()[1]) * 1024


def write_model(folder: Path, size: int) -> int:
    """A Qwen2 model of about `size` bytes in bfloat16, in several files; returns its size."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, Qwen2Config

    def config(layers: int) -> Qwen2Config:
        return Qwen2Config(
            hidden_size=HIDDEN,
            intermediate_size=4 * HIDDEN,
            num_hidden_layers=layers,
            num_attention_heads=16,
            num_key_value_heads=4,
            vocab_size=VOCABULARY,
            tie_word_embeddings=True,
            architectures=["Qwen2ForCausalLM"],
        )

    def shapes(layers: int) -> dict[str, torch.Size]:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config(layers))
        return {name: tensor.shape for name, tensor in model.named_parameters()}

    one, two = (2 * sum(s.numel() for s in shapes(n).values()) for n in (1, 2))
    layers = max(1, round((size - one) / (two - one)) + 1)
    config(layers).save_pretrained(folder)
    files: list[dict[str, torch.Tensor]] = [{}]
    where, written = dict[str, str](), 0

    def flush() -> None:
        name = f"model-{len(where):05d}.safetensors"
        save_file(files[0], folder / name, metadata={"format": "pt"})
        where.update(dict.fromkeys(files[0], name))
        files[0] = {}

    for name, shape in shapes(layers).items():
        files[0][name] = torch.full(shape, 0.01, dtype=torch.bfloat16)
        written += files[0][name].nbytes
        if sum(tensor.nbytes for tensor in files[0].values()) > SHARD:
            flush()
    flush()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return written


def worker(folder: Path) -> None:
    """One rank: prints its bytes above those before the model."""
    import torch

    from areal.config.training import RefConfig
    from areal_torch.engines import fsdp
    from areal_torch.engines.model import source
    from areal_torch.engines.parallel.mesh import join_process_group, local_device

    torch.set_num_threads(1)
    join_process_group(local_device(), 600)
    found: dict[str, float] = {}
    test = vars(fsdp)["self_test"]

    def note(*args: object) -> object:
        found["loading"] = resident("VmHWM") - before
        return test(*args)

    model = str(folder / "model")
    source.build(model, torch.bfloat16)  # imports the architecture
    Path("/proc/self/clear_refs").write_text("5")
    before, began = resident("VmRSS"), time.monotonic()
    engine = fsdp.FSDPEngine(RefConfig(path=model, dtype="bfloat16"))
    with mock.patch.object(fsdp, "self_test", note):
        engine.initialize()
    found["initialized"] = resident("VmHWM") - before
    found["seconds"] = time.monotonic() - began
    (folder / f"rank{engine.rank}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


def main() -> None:
    """Writes the model, starts the ranks, adds up."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size-mb", type=int, default=2048)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--worker", type=Path)
    options = parser.parse_args()
    if options.worker:
        worker(options.worker)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "model").mkdir()
        size = write_model(folder / "model", options.size_mb << 20)
        path = f"{ROOT / 'services'}:{ROOT}"
        launch = ["-m", "torch.distributed.run", "--standalone"]
        subprocess.run(
            [
                *(sys.executable, *launch, f"--nproc-per-node={options.ranks}"),
                *(__file__, "--worker", str(folder)),
            ],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            check=True,
            stdout=sys.stderr,
        )
        ranks = [json.loads(each.read_text()) for each in folder.glob("rank*.json")]
    sums = {key: sum(rank[key] for rank in ranks) for key in ("loading", "initialized")}
    print(
        json.dumps(
            {
                "size": size,
                "ranks": options.ranks,
                **{f"{key}_over_size": round(value / size, 3) for key, value in sums.items()},
                "seconds": round(max(rank["seconds"] for rank in ranks), 1),
            }
        )
    )


if __name__ == "__main__":
    main()
