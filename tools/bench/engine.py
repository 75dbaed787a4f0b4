"""Tokens per second of the CPU engine with logprobs, compared with HF generate and SGLang.

    python tools/bench/engine.py [--concurrent 1 8 32 64] [--seconds 4] [--repeat 5]

All contenders run the same model (Qwen2, random weights), prompts of 32 tokens, 64 new tokens,
sampling at temperature 1, with one thread each. HF: `generate` on a batch of that size, with
logprobs from its scores. Ours: the server over HTTP with that many requests at a time; CPU is that
of the server's process. SGLang, if it is installed (from `make sglang`, or SGLANG_VENV): the same
over HTTP. Contenders alternate, and medians of tokens per CPU-second and per second are printed. On
a busy machine, only tokens per CPU-second can be compared.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[2] / "services"))

os.environ["OMP_NUM_THREADS"] = "1"

import psutil
import torch
from tests.contract.engines import SERVE, running_sglang
from tests.inference_server import running_server

from areal_torch.models.tiny import VOCAB_SIZE, make_tiny_model

PROMPT, NEW = 32, 64
TARGET = 1.3
Rate = tuple[float, float]  # tokens per CPU-second, per second


def prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(count)
    return torch.randint(0, VOCAB_SIZE, (count, PROMPT), generator=generator).tolist()


def cpu_of(pid: int) -> float:
    """CPU seconds of a process and its children."""
    process = psutil.Process(pid)
    times = [p.cpu_times() for p in (process, *process.children(recursive=True))]
    return sum(t.user + t.system for t in times)


def hf_rate(model: Any, batch: int, seconds: float) -> Rate:
    ids = torch.tensor(prompts(batch))
    tokens, cpu, wall = 0, time.process_time(), time.perf_counter()
    while time.perf_counter() - wall < seconds:
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=NEW,
                min_new_tokens=NEW,
                return_dict_in_generate=True,
                output_scores=True,
            )
            model.compute_transition_scores(
                out.sequences, out.scores, normalize_logits=True
            ).tolist()
        tokens += batch * NEW
    return tokens / (time.process_time() - cpu), tokens / (time.perf_counter() - wall)


async def http_rate(url: str, pid: int, batch: int, seconds: float) -> Rate:
    """Each of `batch` clients sends one request after the other."""
    tokens, deadline = 0, 0.0

    async def client(prompt: list[int]) -> None:
        nonlocal tokens
        params = {"max_new_tokens": NEW, "temperature": 1.0, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": params, "return_logprob": True}
        while time.perf_counter() < deadline:
            async with http.post("/generate", json=body) as reply:
                answer = await reply.json()
            assert len(answer["meta_info"]["output_token_logprobs"]) == NEW
            tokens += NEW

    async with aiohttp.ClientSession(url) as http:
        cpu, wall = cpu_of(pid), time.perf_counter()
        deadline = wall + seconds
        await asyncio.gather(*[client(prompt) for prompt in prompts(batch)])
        return tokens / (cpu_of(pid) - cpu), tokens / (time.perf_counter() - wall)


def contenders(
    stack: ExitStack, folder: Path, layers: int
) -> dict[str, Callable[[int, float], Rate]]:
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model_dir = make_tiny_model(folder / "model", num_hidden_layers=layers)
    model = AutoModelForCausalLM.from_pretrained(model_dir).eval()
    server = stack.enter_context(
        running_server(model_dir, "--max-running-requests", "64", "--context-length", "512")
    )
    found: dict[str, Callable[[int, float], Rate]] = {
        "ours": lambda batch, seconds: asyncio.run(
            http_rate(server.url, server.process.pid, batch, seconds)
        ),
        "hf": lambda batch, seconds: hf_rate(model, batch, seconds),
    }
    venv = Path(os.environ.get("SGLANG_VENV", SERVE.parents[2] / ".venv-sglang"))
    if (venv / "bin" / "python").exists():
        url, pid = stack.enter_context(running_sglang(model_dir, folder / "sglang.log"))
        found["sglang"] = lambda batch, seconds: asyncio.run(http_rate(url, pid, batch, seconds))
    return found


def main() -> int:
    """Prints the table and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--concurrent", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--layers", type=int, default=4)
    options = parser.parse_args()
    result: dict[str, Any] = {"bench": "engine", "target": TARGET}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        names = contenders(stack, folder, options.layers)
        print("tokens per CPU-second (per second)")
        print(f"{'concurrent':>10s}" + "".join(f"{n:>18s}" for n in names) + f"{'ours/hf':>9s}")
        for batch in options.concurrent:
            rates: dict[str, list[Rate]] = {name: [] for name in names}
            for _ in range(options.repeat):
                for name, rate in names.items():
                    rates[name].append(rate(batch, options.seconds))
            medians = {
                n: tuple(map(statistics.median, zip(*r, strict=True))) for n, r in rates.items()
            }
            ratio = medians["ours"][0] / medians["hf"][0]
            cells = "".join(f"{f'{cpu:.0f} ({wall:.0f})':>18s}" for cpu, wall in medians.values())
            print(f"{batch:10d}{cells}{ratio:9.2f}", flush=True)
            result[str(batch)] = {
                "ratio": round(ratio, 2),
                **{n: [round(cpu), round(wall)] for n, (cpu, wall) in medians.items()},
            }
    result["load"] = round(os.getloadavg()[0], 1)
    result["met"] = all(result[str(b)]["ratio"] >= TARGET for b in options.concurrent)
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
