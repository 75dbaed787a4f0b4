"""A program that knows only a base URL and a key is run as an agent, and ends completely."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from tests.unit.areal.agents.scripted_model import Scripted, check_exact, serving
from tests.waiting import until

from areal.agents.command import OUTPUT_BYTES, CommandResult, run_command
from areal.errors import InvalidInput

AGENT = """
import openai, sys
client = openai.OpenAI()
messages = [{"role": "user", "content": sys.argv[1]}]
for _ in range(2):
    stream = client.chat.completions.create(model="any", messages=messages, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Sure?"}]
print("answer:", text)
"""


async def run(program, *arguments, url="http://127.0.0.1:1/v1", key="sk-1", **options):
    command = [sys.executable, "-c", program, *arguments]
    return await run_command(command, url, key, **{"timeout_s": 60.0, **options})


def exists(*path: str) -> bool:
    return Path(*path).exists()


def ended(pid: str) -> bool:
    """Gone, or a zombie that nobody has waited for."""
    stat = Path("/proc", pid.strip(), "stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


async def test_command_when_it_uses_openai_then_its_calls_are_recorded_as_sampled():
    scripted = Scripted("It is 46.", "Yes, 46.")
    async with serving(scripted) as (url, key, _, calls):
        result = await run(AGENT, "12+34; {braces} $HOME", url=url, key=key)
    assert result.exit_code == 0, result.output
    assert result.output == "answer: Yes, 46.\n"
    check_exact(calls, scripted, chains=[[0, 1]])


async def test_command_when_it_uses_anthropic_then_it_finds_the_model():
    scripted = Scripted("46")
    program = """
import anthropic
ask = [{"role": "user", "content": "12+34"}]
answer = anthropic.Anthropic().messages.create(model="any", max_tokens=50, messages=ask)
print(answer.content[0].text)
"""
    async with serving(scripted) as (url, key, *_):
        assert (await run(program, url=url, key=key)).output == "46\n"


async def test_command_when_it_fails_then_its_exit_code_and_both_outputs_are_returned():
    result = await run("import sys; print('a', flush=True); sys.exit('no luck')")
    assert (result.exit_code, result.output) == (1, "a\nno luck\n")


async def test_command_when_started_then_it_sees_no_secret_and_its_own_folder(monkeypatch):
    monkeypatch.setenv("AREAL_TOKEN", "hidden")
    monkeypatch.setenv("WANDB_API_KEY", "hidden")
    program = "import json, os; print(json.dumps([dict(os.environ), os.getcwd(), os.listdir()]))"
    result = await run(program, environment={"MORE": "1"})
    seen, folder, files = json.loads(result.output)
    assert "hidden" not in seen.values()
    assert (seen["MORE"], seen["HOME"], seen["TMPDIR"]) == ("1", folder, folder)
    assert files == []
    assert not exists(folder)


async def test_command_when_given_a_folder_then_its_files_stay(tmp_path):
    await run("open('made.txt', 'w').write('x')", folder=tmp_path)
    assert (tmp_path / "made.txt").read_text() == "x"


async def test_command_when_out_of_time_then_all_it_started_is_killed(tmp_path):
    program = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""
    before = time.monotonic()
    result = await run(program, timeout_s=3.0)
    assert result.exit_code is None
    assert time.monotonic() - before < 30
    await until(lambda: ended(result.output))


async def test_command_when_it_leaves_a_process_behind_then_that_is_killed_too():
    program = """
import subprocess, sys
print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid)
"""
    async with asyncio.timeout(30):
        result = await run(program)
    assert result.exit_code == 0
    await until(lambda: ended(result.output))


async def test_command_when_a_process_left_its_group_then_the_command_still_ends():
    program = """
import subprocess, sys
child = [sys.executable, "-c", "import time; time.sleep(600)"]
print(subprocess.Popen(child, start_new_session=True).pid)
"""
    result: CommandResult | None = None
    try:
        async with asyncio.timeout(20):
            result = await run(program)
    finally:
        if result is not None:
            os.kill(int(result.output), signal.SIGKILL)
    assert result.exit_code == 0


async def test_command_when_cancelled_then_it_is_killed(tmp_path):
    program = "import os, time; open('pid', 'w').write(str(os.getpid())); time.sleep(600)"
    running = asyncio.create_task(run(program, folder=tmp_path))
    await until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not exists("/proc", (tmp_path / "pid").read_text())


async def test_command_when_it_writes_without_end_then_only_the_end_is_kept():
    result = await run("import sys; sys.stdout.write('x' * 5_000_000 + 'end')")
    assert result.exit_code == 0
    assert len(result.output) == OUTPUT_BYTES
    assert result.output.endswith("xend")


@pytest.mark.parametrize("command", [["no-such-program"], ["/etc/hostname"], ["a\0b"]])
async def test_command_when_it_cannot_be_started_then_one_line_says_so(command):
    with pytest.raises(InvalidInput, match=r"command .*: cannot be started \("):
        await run_command(command, "http://x/v1", "sk-1", timeout_s=1.0)
