"""What a CPU can check of a train step on a GPU: devices, waits of the host, bytes moved."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from areal.memory_estimate import HEAD_TOKENS

ROOT = Path(__file__).parents[4]
LIMIT_S = 300
# Bytes that the head moved per loss token, by the model's width, before it kept probabilities: in
# chunks of 441 tokens, whose weight gradients it added up in float32.
BEFORE = {896: 20_832_632, 1536: 25_945_692, 3584: 42_307_484}


@pytest.fixture(scope="module")
def fake(tmp_path_factory):
    """Returns a function that runs a case of fake_gpu.py."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ on PATH: the fake GPU has to be compiled")
    library, here = tmp_path_factory.mktemp("gpu") / "fake_cuda.so", Path(__file__).parent
    home = Path(torch.__file__).parent
    command = [compiler, "-std=c++20", "-shared", "-fPIC", f"-I{home}/include"]
    command += [str(here / "fake_cuda.cpp"), "-o", str(library)]
    command += [f"-L{home}/lib", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{home}/lib"]
    subprocess.run(command, check=True, timeout=LIMIT_S)
    own = {"PYTHONPATH": f"{ROOT / 'services'}:{ROOT}", "OMP_NUM_THREADS": "1"}

    def run(*case):
        done = subprocess.run(
            [sys.executable, "-m", "tests.unit.areal_torch.engines.fake_gpu", json.dumps(case)],
            env={**os.environ, **own, "FAKE_CUDA": str(library)},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])

    return run


def test_head_when_it_trains_on_a_gpu_then_moves_a_third_of_the_bytes(fake):
    kept = fake("head", list(BEFORE), 2 * HEAD_TOKENS, HEAD_TOKENS)
    assert all(3 * kept[str(width)] <= before for width, before in BEFORE.items()), kept
    # More loss tokens in a micro-batch than probabilities are kept for: logits come twice.
    again = fake("head", list(BEFORE), 8 * HEAD_TOKENS, HEAD_TOKENS)
    assert all(2 * again[str(width)] <= before for width, before in BEFORE.items()), again


@pytest.mark.parametrize(
    "case",
    [
        ("qwen2.5-0.5b", "d1"),
        ("qwen2.5-0.5b", "d1", "auto", "offload", "float32", "lora"),
        ("qwen2.5-0.5b", "d1", "auto", "none", "float32", "offload"),
        ("qwen2.5-0.5b", "d2c2"),
        *(
            pytest.param(case, marks=pytest.mark.long)
            for case in (
                ("qwen2.5-0.5b", "d1", "packed", "full", "bfloat16"),
                ("qwen2.5-0.5b", "d8", "auto", "selective"),
                ("qwen2.5-0.5b", "d2t2"),
                ("qwen2.5-0.5b", "d1", "auto", "offload"),
                ("qwen2.5-0.5b", "d1", "auto", "none", "float32", "lora"),
                ("qwen3-30b-a3b", "d1", "auto", "none", "bfloat16"),
            )
        ),
    ],
    ids=" ".join,
)
def test_train_step_when_on_a_gpu_then_the_host_waits_once(fake, case):
    """With actor.offload, FSDP waits for each gradient that it adds to one in host memory, too."""
    found = fake("step", *case)
    assert found["waits"] == [["aten._to_copy.default"] * (1 + found["offloaded"])] * 2
    assert found["steps"] == 2
    assert 0 < found["stats"]["mfu"] < 1
