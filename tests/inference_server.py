"""Tiny models on disk, and a real inference server process around one of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

REPOSITORY = Path(__file__).parent.parent
START_TIMEOUT_S = 120.0


def make_model(folder: Path, kind: str = "qwen2", *, seed: int = 0, **options: Any) -> Any:
    """Save a random transformers model of the Qwen2 or Llama family; returns it in eval mode."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

    torch.set_num_threads(1)
    values = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 131,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 0,
        **options,
    }
    config = (Qwen2Config if kind == "qwen2" else LlamaConfig)(**values)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Everything counts: norms and biases too, unlike in a freshly initialized model.
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.12)
    model.save_pretrained(folder)
    return model


def save_tokenizer(folder: Path) -> None:
    """A word-level tokenizer over "<s> </s> w2 w3 … w130"."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<s>": 0, "</s>": 1, **{f"w{i}": i for i in range(2, 131)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))


class ServerProcess:
    """A running `python -m areal_inference`, with its log lines."""

    def __init__(self, process: subprocess.Popen[str]):
        self.process = process
        self.lines: list[str] = []
        self._seen = threading.Condition()
        self._reader = threading.Thread(target=self._read, args=(process.stderr,), daemon=True)
        self._reader.start()
        self.url = self.wait_for_event("listening")["url"]

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            with self._seen:
                self.lines.append(line)
                self._seen.notify_all()
        with self._seen:
            self.lines.append("")
            self._seen.notify_all()

    def wait_for_event(self, event: str) -> dict[str, Any]:
        """The first log line with this event; fails when the process ends without it."""
        deadline = time.monotonic() + START_TIMEOUT_S
        index = 0
        with self._seen:
            while True:
                for line in self.lines[index:]:
                    index += 1
                    entry = json.loads(line) if line.startswith("{") else {}
                    if entry.get("event") == event:
                        return entry
                    assert line, f"server ended without {event!r}: {''.join(self.lines)}"
                left = deadline - time.monotonic()
                assert left > 0, f"no {event!r} within {START_TIMEOUT_S} s: {''.join(self.lines)}"
                self._seen.wait(left)

    def stop(self) -> int:
        """SIGTERM, then the exit code."""
        self.process.terminate()
        try:
            return self.process.wait(60)
        finally:
            self.process.kill()
            self._reader.join(60)
            if not self._reader.is_alive() and self.process.stderr is not None:
                self.process.stderr.close()


def start_process(model: Path, *flags: str) -> subprocess.Popen[str]:
    """Start the command line on a free port; stderr is a pipe."""
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "areal_inference",
            "--model-path",
            str(model),
            "--port",
            "0",
            *flags,
        ],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY / "services"), "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )


@contextmanager
def running_server(model: Path, *flags: str) -> Iterator[ServerProcess]:
    """A ready server; stopped and checked for a clean exit at the end, unless it was killed."""
    server = ServerProcess(start_process(model, *flags))
    try:
        server.wait_for_event("ready")
        yield server
    finally:
        code = server.stop()
    assert code in (0, -signal.SIGKILL), "".join(server.lines)
