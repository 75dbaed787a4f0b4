"""What a trainer's process sets before it trains: device, allocator, threads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from areal.chassis.bad_input import VERDICT_VARIABLE, read_verdict
from areal.config.experiment import GRPOConfig, build_config, save_config
from areal_launch.processes.process import CHILD_ENVIRONMENT
from areal_trainer.job import grow_segments, threads_of_rank


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"},
            {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"},
        ),
        ({"PYTORCH_ALLOC_CONF": ""}, {"PYTORCH_ALLOC_CONF": ""}),
    ],
)
def test_allocator_when_the_user_has_not_configured_it_then_segments_may_grow(
    given: dict[str, str], expected: dict[str, str]
) -> None:
    grow_segments(given)
    assert given == expected
    assert not set(expected) & set(CHILD_ENVIRONMENT), "servers do not get it"


@pytest.mark.parametrize(
    ("offload", "environment", "threads"),
    [
        (False, {}, 1),
        (False, {"OMP_NUM_THREADS": "3", "LOCAL_WORLD_SIZE": "2"}, 3),
        (True, {"OMP_NUM_THREADS": "1"}, 96),
        (True, {"OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "8"}, 12),
        (True, {"LOCAL_WORLD_SIZE": "200"}, 1),
    ],
)
def test_threads_when_the_optimizer_runs_on_the_cpu_then_ranks_share_all_cores(
    offload: bool, environment: dict[str, str], threads: int
) -> None:
    config = build_config(GRPOConfig, None, [f"actor.offload={str(offload).lower()}"])
    assert threads_of_rank(config, environment, cores=96) == threads


_SHOWS = """
import ctypes, json, os, pathlib, threading
folder = pathlib.Path(__file__).parent
segments = os.environ["PYTORCH_CUDA_ALLOC_CONF"]

def arenas():
    together, kept = threading.Barrier(8), []
    def allocate():
        together.wait()
        kept.append(bytearray(4096))
        together.wait()
    threads = [threading.Thread(target=allocate) for _ in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    libc = ctypes.CDLL(None)
    libc.fopen.restype = ctypes.c_void_p
    file = ctypes.c_void_p(libc.fopen(os.fsencode(folder / "arenas.xml"), b"w"))
    libc.malloc_info(0, file)
    libc.fclose(file)
    return (folder / "arenas.xml").read_text().count("<heap nr=")

def main(argv):
    import torch
    shown = [segments, torch.get_num_threads(), arenas()]
    (folder / "shown.json").write_text(json.dumps(shown))
"""


@pytest.mark.parametrize(
    ("given", "least", "most"),
    [
        ({}, 2, 2),
        ({"MALLOC_ARENA_MAX": "5"}, 3, 5),
        ({"GLIBC_TUNABLES": "glibc.malloc.arena_max=4"}, 3, 4),
    ],
)
def test_trainer_when_started_then_allocators_and_threads_are_set_before_the_recipe_runs(
    tmp_path: Path, given: dict[str, str], least: int, most: int
) -> None:
    recipe = tmp_path / "recipe.py"
    recipe.write_text(_SHOWS)
    ran = train(tmp_path, recipe, "actor.offload=true", OMP_NUM_THREADS="1", **given)
    assert ran.returncode == 0, ran.stderr[-2000:]
    segments, threads, arenas = json.loads((tmp_path / "shown.json").read_text())
    assert segments == "expandable_segments:True"
    assert threads == len(os.sched_getaffinity(0))
    assert least <= arenas <= most


def test_trainer_when_its_gpus_cannot_be_used_then_it_refuses_for_good(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.py"
    recipe.write_text("def main(argv):\n    raise SystemExit('trained')\n")
    ran = train(tmp_path, recipe, "stack.gpus_per_node=1")
    assert ran.returncode == 2
    line = ran.stderr.strip().splitlines()[-1]
    assert line.startswith(
        "areal-trainer: a GPU was asked for (CUDA_VISIBLE_DEVICES=), but torch 2."
    )
    assert read_verdict(tmp_path / "verdict") == line.removeprefix("areal-trainer: ")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("{}['oops']", "KeyError: 'oops'"),
        ("import no_such_package", "ModuleNotFoundError: No module named 'no_such_package'"),
    ],
)
def test_trainer_when_main_raises_a_mistake_then_it_refuses_for_good_and_names_the_line(
    tmp_path: Path, body: str, said: str
) -> None:
    """Five restarts, each of which loads the model and repeats steps, would say the same."""
    recipe = tmp_path / "recipe.py"
    recipe.write_text(f"def main(argv):\n    {body}\n")
    ran = train(tmp_path, recipe)
    assert ran.returncode == 2, ran.stderr[-2000:]
    assert ran.stderr.strip().splitlines()[-1] == f"areal-trainer: {said} ({recipe}:2)"
    assert read_verdict(tmp_path / "verdict") == f"{said} ({recipe}:2)"
    assert "trainer_failed" in ran.stderr, "the traceback is in the log"


def test_trainer_when_torch_is_not_installed_then_it_refuses_for_good_and_says_how(
    tmp_path: Path,
) -> None:
    broken = tmp_path / "site" / "torch"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\")")
    recipe = tmp_path / "recipe.py"
    recipe.write_text("def main(argv):\n    pass\n")
    ran = train(tmp_path, recipe, first_path=str(broken.parent))
    assert ran.returncode == 2, ran.stderr[-2000:]
    line = "No module named 'torch'; pip install 'areal-services[trainer]'"
    assert read_verdict(tmp_path / "verdict") == line


def train(
    folder: Path, recipe: Path, *overrides: str, first_path: str = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    settings = [f"run_root={folder}", f"recipe={recipe}", "allocation_mode=fsdp:d1"]
    config = build_config(GRPOConfig, None, [*settings, *overrides])
    file = folder / "config.yaml"
    save_config(config, file)
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("PYTORCH_")}
    source = Path(__file__).resolve().parents[3] / "services"
    return subprocess.run(
        [sys.executable, "-m", "areal_trainer", "--config", str(file)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={
            **inherited,
            "PYTHONPATH": f"{first_path}{os.pathsep}{source}" if first_path else str(source),
            "CUDA_VISIBLE_DEVICES": "",
            VERDICT_VARIABLE: str(folder / "verdict"),
            **environment,
        },
    )
