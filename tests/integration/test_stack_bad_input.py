"""What `areal run` and `areal up` refuse: one clear line, nothing started.

Exit code 2 for what cannot be read or makes no sense, 1 for what cannot start here.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tests.integration.stack_tools import areal, environment

GOOD = "def main(argv): pass\n"


def make_model(folder: Path) -> Path:
    """Enough of a model to pass the launcher's look at it; nothing will be started."""
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")
    return folder


@pytest.mark.parametrize(
    ("recipe", "arguments", "expected"),
    [
        (
            GOOD,
            ["rollout.max_head_ofpolicyness=1"],
            "did you mean 'rollout.max_head_offpolicyness'",
        ),
        (GOOD, ["gconfig.n_samples=many"], "gconfig.n_samples"),
        (GOOD, ["total_train_steps"], "override 'total_train_steps': expected key=value"),
        (GOOD, ["allocation_mode=vllm:d1"], "allocation_mode 'vllm:d1': expected e.g."),
        (GOOD, ["model.path=''"], "experiment file 'recipe.yaml': does not exist"),
        (GOOD, ["gconfig.max_new_tokens=4096"], "expected less than model.context_length 4096"),
        (GOOD, ["--config", "nowhere.yaml"], "config file 'nowhere.yaml' does not exist"),
        ("def main(argv)\n    pass\n", [], "recipe.py:1: expected ':'"),
        ("import nowhere\n", [], "recipe.py:1: ModuleNotFoundError"),
        ("x = 1\n", [], "expected a function main(argv)"),
        (None, [], "recipe 'recipe.py': No such file or directory"),
    ],
)
def test_run_when_input_is_bad_then_one_line_and_nothing_started(
    tmp_path: Path, recipe: str | None, arguments: list[str], expected: str
) -> None:
    make_model(tmp_path / "model")
    if recipe is not None:
        (tmp_path / "recipe.py").write_text(recipe)
    check_refused(tmp_path, arguments, code=2, expected=expected)


@pytest.mark.parametrize(
    ("missing", "arguments", "expected"),
    [
        ("", ["model.path=nowhere"], "model.path 'nowhere': no config.json there"),
        ("tokenizer.json", [], "model.path 'model': no tokenizer.json there"),
        ("model.safetensors", [], "model.path 'model': no *.safetensors there"),
        ("", ["run_root=recipe.py"], "recipe.py is a file, expected a folder"),
        # No one may write there, not even root.
        ("", ["run_root=/proc/sys/kernel"], "this user may not write in /proc/sys/kernel"),
        ("", ["weight_sync.path=recipe.py"], "weight_sync.path 'recipe.py': "),
        ("", ["train_dataset.path=rows.jsonl"], "train_dataset.path 'rows.jsonl': no such file"),
    ],
)
def test_run_when_it_cannot_start_here_then_one_line_and_nothing_started(
    tmp_path: Path, missing: str, arguments: list[str], expected: str
) -> None:
    model = make_model(tmp_path / "model")
    (tmp_path / "recipe.py").write_text(GOOD)
    if missing:
        (model / missing).unlink()
    check_refused(tmp_path, arguments, code=1, expected=expected)


def test_run_when_the_dashboards_port_is_taken_then_one_line_and_nothing_started(
    tmp_path: Path,
) -> None:
    make_model(tmp_path / "model")
    (tmp_path / "recipe.py").write_text(GOOD)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        said = f"stack.gateway_port {port}: something listens there already"
        check_refused(tmp_path, [f"stack.gateway_port={port}"], code=1, expected=said)


def check_refused(folder: Path, arguments: list[str], *, code: int, expected: str) -> None:
    done = areal("run", "recipe.py", "model.path=model", *arguments, cwd=folder)
    assert done.returncode == code, done.stdout + done.stderr
    assert expected in done.stderr
    assert done.stderr.startswith("areal: ")
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""
    assert not (folder / "runs").exists()


@pytest.mark.parametrize("command", ["status", "down", "submit", "logs", "dead-letters"])
def test_command_when_no_stack_runs_then_says_where_it_looked(tmp_path: Path, command: str) -> None:
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "1"}\n')
    arguments = {"submit": ["tasks.jsonl"], "dead-letters": ["list"]}.get(command, [])
    done = areal(command, *arguments, cwd=tmp_path)
    assert done.returncode == 1
    ended_too = command in ("logs", "dead-letters")  # these also read runs that have ended
    sought = "run" if ended_too else "running stack"
    assert done.stderr.startswith(f"areal: no {sought} under 'runs'")


def test_service_when_its_port_is_in_use_then_one_line(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("experiment_name: ports\n")
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        done = subprocess.run(
            [sys.executable, "-m", "areal_buffer", "--config", str(config), "--listen", address],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 2
    assert done.stderr == (
        f"areal-buffer: --listen {address}: cannot listen there: Address already in use\n"
    )
