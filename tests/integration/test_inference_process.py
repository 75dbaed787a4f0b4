"""Life of the process: starting, refusing to start, stopping."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from tests.inference_server import ServerProcess, make_model, running_server, start_process


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_model(path, max_position_embeddings=8192)
    return path


def call(url: str, body: object | None = None) -> tuple[int, str]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def fails_to_start(folder: Path, *flags: str) -> str:
    """The one line on stderr of a server that must refuse to start."""
    process = start_process(folder, *flags)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    lines = [line for line in errors.splitlines() if not line.startswith("{")]
    assert len(lines) == 1, errors
    assert lines[0].startswith("areal-inference: ")
    return lines[0]


def test_start_when_model_is_missing_then_one_line(tmp_path: Path):
    assert "no such folder" in fails_to_start(tmp_path / "nothing")


def test_start_when_architecture_is_unknown_then_one_line(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')
    assert "architecture GPT2LMHeadModel" in fails_to_start(tmp_path)


def test_start_when_weights_are_truncated_then_one_line(tmp_path: Path):
    make_model(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    assert "truncated or torn" in fails_to_start(tmp_path)


def test_start_when_port_is_in_use_then_one_line(folder: Path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        line = fails_to_start(folder, "--port", str(port))
    assert f"127.0.0.1:{port}: cannot listen there: Address already in use" in line


def test_start_when_config_key_is_mistyped_then_one_line(folder: Path, tmp_path: Path):
    file = tmp_path / "config.yaml"
    file.write_text("inference:\n  max_runing_requests: 3\n")
    line = fails_to_start(folder, "--config", str(file))
    assert "did you mean 'max_running_requests'?" in line


def test_health_when_starting_then_503_until_ready(folder: Path):
    server = ServerProcess(start_process(folder))
    try:
        status, text = call(f"{server.url}/health")
        if status != 200:  # the model may already be loaded
            assert status == 503
            assert "starting" in text
            refused = call(f"{server.url}/generate", {"input_ids": [5]})[0] == 503
            assert refused or call(f"{server.url}/health")[0] == 200  # it was, meanwhile
        server.wait_for_event("ready")
        assert call(f"{server.url}/health") == (200, "")
    finally:
        assert server.stop() == 0


def test_stop_when_still_starting_then_exit_0(folder: Path):
    server = ServerProcess(start_process(folder))
    assert server.stop() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stop_when_requests_run_then_partials_with_200_and_exit_0(folder: Path, number: int):
    body = {
        "input_ids": [5, 6],
        "sampling_params": {"max_new_tokens": 8000, "ignore_eos": True, "n": 4},
        "return_logprob": True,
    }
    with running_server(folder, "--skip-tokenizer-init") as server:
        answers: list[tuple[int, str]] = []
        client = threading.Thread(
            target=lambda: answers.append(call(f"{server.url}/generate", body))
        )
        client.start()
        deadline = time.monotonic() + 60
        while not json.loads(call(f"{server.url}/v1/loads")[1])["loads"][0]["num_running_reqs"]:
            assert time.monotonic() < deadline
        server.process.send_signal(number)
        assert server.process.wait(60) == 0
        client.join(60)
    status, text = answers[0]
    assert status == 200
    for answer in json.loads(text):
        reason = answer["meta_info"]["finish_reason"]
        assert (reason["type"], reason["message"]) == ("abort", "server is shutting down")
        count = len(answer["output_ids"])
        assert 0 < count < 8000
        assert len(answer["meta_info"]["output_token_logprobs"]) == count
        assert "text" not in answer


def test_cache_when_small_then_requests_are_retracted_and_all_finish(folder: Path):
    """32 sequences of 230 tokens through a cache of 1500: rows are given up and computed again."""
    with running_server(folder, "--max-total-tokens", "1500", "--context-length", "512") as server:
        body = {
            "input_ids": [[5, 6 + i] for i in range(32)],
            "sampling_params": {"max_new_tokens": 230, "ignore_eos": True, "temperature": 0},
        }
        status, text = call(f"{server.url}/generate", body)
        assert status == 200
        answers = json.loads(text)
        assert all(len(a["output_ids"]) == 230 for a in answers)
        assert sum(a["meta_info"]["num_retractions"] for a in answers) > 0
        alone = json.loads(call(f"{server.url}/generate", {**body, "input_ids": [5, 6]})[1])
        assert alone["output_ids"] == answers[0]["output_ids"]
        status, text = call(f"{server.url}/generate", {"input_ids": [5] * 600})
        assert status == 400
        assert "longer than the model's context length (512 tokens)" in text
