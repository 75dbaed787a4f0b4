"""One train step of a model made of sizes; prints its peak memory and what was estimated for it.

python -m tests.integration.memory_worker FOLDER '{"gradient_checkpointing": true}'
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

TOKENS, LENGTH, VOCABULARY = 3072, 512, 4096


def peak_bytes() -> int:
    """Largest resident memory since it was last reset."""
    status = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in status if line.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024


def main(folder: Path, options: dict[str, object]) -> None:
    import torch
    from transformers import Qwen2Config

    from areal.config.experiment import GRPOConfig
    from areal.config.training import MicroBatchSpec, PPOActorConfig
    from areal.memory_estimate import ModelShape
    from areal_launch.doctor.memory import trainer_rank
    from areal_torch.algorithms import packing
    from areal_torch.engines.fsdp import FSDPEngine

    torch.set_num_threads(1)
    Qwen2Config(
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        tie_word_embeddings=True,
        architectures=["Qwen2ForCausalLM"],
    ).save_pretrained(folder)
    config = GRPOConfig(allocation_mode="sglang:d1+fsdp:d1")
    config.model.context_length = TOKENS
    config.actor = PPOActorConfig(
        path=str(folder),
        init_from_scratch=True,
        mb_spec=MicroBatchSpec(max_tokens_per_mb=TOKENS),
        **options,
    )
    engine = FSDPEngine(config.actor)
    engine.initialize()
    sequences = [
        {
            "input_ids": torch.randint(0, VOCABULARY, (LENGTH,)).tolist(),
            "loss_mask": [False] + [True] * (LENGTH - 1),
        }
        for _ in range(TOKENS // LENGTH)
    ]
    batch = packing.pack(sequences, list(range(len(sequences))))
    Path("/proc/self/clear_refs").write_text("5")  # the peak of loading does not count
    engine.train_batch(batch, lambda p, _, mb: (-(p * mb["loss_mask"]).sum(), {}))
    peak = peak_bytes()
    need = trainer_rank(config, ModelShape.read(folder), gpu=False).need
    print(json.dumps({"peak": peak, "need": need.total, "parts": need.parts}))
    engine.destroy()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
