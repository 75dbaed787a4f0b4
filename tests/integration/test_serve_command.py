"""`areal serve MODEL`: a model for people, by OpenAI's SDK."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import anthropic
import openai
import pytest
from tests.integration.stack_tools import areal

pytestmark = [pytest.mark.timeout(180)]


class Serving:
    """The command, its output, and what it told."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        self._ready = threading.Event()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()
        assert self._ready.wait(90), self.lines
        self.urls = re.findall(r"serving (http\S+)", "\n".join(self.lines))
        self.run = re.findall(r"areal token --run (\S+)", "\n".join(self.lines))[0]

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            if "Ctrl-C" in line:
                self._ready.set()
        self._ready.set()


@pytest.fixture(scope="module")
def serving(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "areal_launch.cli", "serve", str(tiny_model)),
            *("--servers", "2", "model.context_length=256"),
        ],
        cwd=tmp_path_factory.mktemp("serve"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    serving = Serving(process)
    yield serving
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    process.wait(30)
    serving.reader.join(60)
    assert process.stdout is not None
    process.stdout.close()


def key_of(serving: Serving, cwd: Path) -> str:
    folder = Path(f"/proc/{serving.process.pid}/cwd").readlink() / serving.run
    return areal("token", "--run", str(folder), cwd=cwd).stdout.strip()


def test_serve_when_asked_by_sdks_then_every_server_answers(
    serving: Serving, tmp_path: Path
) -> None:
    assert len(set(serving.urls)) == 2, serving.lines
    key = key_of(serving, tmp_path)
    question = [{"role": "user", "content": "7+8="}]
    said = []
    for url in serving.urls:
        with openai.OpenAI(base_url=url, api_key=key, max_retries=0) as client:
            (model,) = client.models.list().data
            answer = client.chat.completions.create(
                model=model.id, messages=question, max_tokens=8, temperature=0.0
            )
            assert answer.usage is not None
            assert answer.usage.completion_tokens <= 8
            assert answer.choices[0].finish_reason in ("length", "stop")
            streamed = client.chat.completions.create(
                model=model.id, messages=question, max_tokens=8, temperature=0.0, stream=True
            )
            text = "".join(e.choices[0].delta.content or "" for e in streamed if e.choices)
            assert text == (answer.choices[0].message.content or "")
            said.append(text)
            several = client.chat.completions.create(
                model=model.id, messages=question, max_tokens=8, n=3
            )
            assert len(several.choices) == 3
        root = url.removesuffix("/v1")
        with anthropic.Anthropic(base_url=root, auth_token=key, max_retries=0) as other:
            message = other.messages.create(model=model.id, messages=question, max_tokens=8)
            assert message.usage.output_tokens <= 8
    assert said[0] == said[1], "greedy answers of one model are the same"


def test_serve_when_the_key_or_the_body_is_wrong_then_the_api_says_so(
    serving: Serving, tmp_path: Path
) -> None:
    def client(key: str) -> openai.OpenAI:
        return openai.OpenAI(base_url=serving.urls[0], api_key=key, max_retries=0)

    with client("wrong") as stranger, pytest.raises(openai.AuthenticationError):
        stranger.models.list()
    known = client(key_of(serving, tmp_path))
    with known, pytest.raises(openai.BadRequestError, match="temperature"):
        known.chat.completions.create(
            model="any",
            messages=[{"role": "user", "content": "1"}],
            temperature="hot",  # type: ignore[call-overload]
        )
    known = client(key_of(serving, tmp_path))
    with known, pytest.raises(openai.BadRequestError, match=r"maximum|longer"):
        known.chat.completions.create(
            model="any", messages=[{"role": "user", "content": "1" * 400}]
        )


def test_serve_when_interrupted_then_it_ends_cleanly_and_leaves_no_process(
    serving: Serving,
) -> None:
    serving.process.send_signal(signal.SIGINT)
    assert serving.process.wait(30) == 0
    for url in serving.urls:
        port = int(url.rsplit(":", 1)[1].split("/")[0])
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.1", port), 1.0)


def test_serve_when_there_is_no_such_model_then_one_line_says_so(tmp_path: Path) -> None:
    done = areal("serve", str(tmp_path / "none"), cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.strip().count("\n") == 0
    assert "config.json" in done.stderr
