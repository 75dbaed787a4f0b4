"""Runs an existing program as an agent: a process of its own that gets a base URL and a key.

| the command                     | then                                                       |
|---------------------------------|------------------------------------------------------------|
| ends                            | its exit code and the end of its output are returned       |
| is still running at `timeout_s` | it is killed; the exit code is None                        |
| leaves processes behind         | they are killed with its process group                     |
| is not found                    | InvalidInput                                               |

A process that left the process group (`setsid`) is not killed: run untrusted commands in a
sandbox. What it writes is no longer read.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from areal.errors import InvalidInput

OUTPUT_BYTES = 64 * 1024
"""How much of the end of a command's output is kept."""
_INHERITED = ("PATH", "LANG", "LC_ALL", "TZ", "PYTHONUTF8")
_REST_S = 1.0
"""How long the rest of the output is read after the end of the command, in seconds."""


@dataclass(frozen=True)
class CommandResult:
    """How a command ended."""

    exit_code: int | None
    """Negative: minus the number of the signal that ended it. None: it ran out of time."""
    output: str
    """The end of its standard output and standard error together, at most OUTPUT_BYTES."""


async def run_command(
    command: Sequence[str],
    base_url: str,
    api_key: str,
    *,
    timeout_s: float,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> CommandResult:
    """Runs a program that calls the model through OpenAI's or Anthropic's API.

    The program finds the model through OPENAI_BASE_URL, OPENAI_API_BASE, OPENAI_API_KEY,
    ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY. From the caller's environment it gets only PATH, the
    locale and the time zone. Its standard input is empty. HOME and TMPDIR are its working folder.

    Args:
        command: The program and its arguments; they are not passed through a shell.
        base_url: The `base_url` of AgentWorkflow's `run`.
        api_key: The `api_key` of AgentWorkflow's `run`.
        timeout_s: Time limit of the program, in seconds.
        folder: The working folder; None: a new one, deleted at the end.
        environment: Additional environment variables.

    Raises:
        InvalidInput: The program cannot be started.

    Example:
        >>> async def run(task, base_url, api_key):
        ...     command = ["my-agent", "--task", task["question"]]
        ...     result = await run_command(command, base_url, api_key, timeout_s=300)
        ...     return float(task["answer"] in result.output)
    """
    if folder is None:
        made = Path(tempfile.mkdtemp(prefix="areal-agent-"))
        try:
            return await run_command(
                command,
                base_url,
                api_key,
                timeout_s=timeout_s,
                folder=made,
                environment=environment,
            )
        finally:
            # In a thread: an agent's checkout may hold 100,000 files.
            await asyncio.to_thread(shutil.rmtree, made, ignore_errors=True)
    variables = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    variables |= {"HOME": str(folder), "TMPDIR": str(folder)}
    variables |= {"OPENAI_API_KEY": api_key, "ANTHROPIC_API_KEY": api_key}
    variables |= {"OPENAI_BASE_URL": base_url, "OPENAI_API_BASE": base_url}
    variables |= {"ANTHROPIC_BASE_URL": base_url, **(environment or {})}
    # A pipe of our own: asyncio's would also wait for every process that inherited it.
    reading, writing = os.pipe()
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            cwd=folder,
            env=variables,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=writing,
            stderr=writing,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        os.close(reading)
        raise InvalidInput(f"command {command[:1]}: cannot be started ({error})") from error
    finally:
        os.close(writing)
    end = bytearray()
    output = asyncio.create_task(_read_end(reading, end))
    exit_code: int | None = None
    try:
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                exit_code = await process.wait()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        # The pipe has no end while a process outside the group holds it open.
        _, unread = await asyncio.wait([output], timeout=_REST_S)
        for task in unread:
            task.cancel()
    return CommandResult(exit_code, end.decode(errors="replace"))


async def _read_end(reading: int, end: bytearray) -> None:
    """Reads a pipe until nothing can write to it; keeps its last OUTPUT_BYTES in `end`."""
    reader = asyncio.StreamReader()
    with os.fdopen(reading, "rb", buffering=0) as pipe:
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), pipe
        )
        try:
            while part := await reader.read(OUTPUT_BYTES):
                end += part
                del end[:-OUTPUT_BYTES]
        finally:
            transport.close()
