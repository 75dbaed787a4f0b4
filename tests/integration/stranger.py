"""What another user of the machine tries on a stack: run as a program, under another uid.

    python -m tests.integration.stranger UID RUN_DIR WEIGHT_STORE MARK

Prints a JSON object: what was tried -> "refused: " and by what, or "got in: " and what was got.
The recipe it submits would write the file MARK as the stack's owner.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import io
import json
import os
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.buffer_client import BufferClient

from areal.clients.reward import RewardClient
from areal.clients.rollout import RolloutClient
from areal.clients.weight_sync import WeightSyncClient
from areal.errors import ArealError, NotFound, Unauthenticated
from areal.protocol.scores import ScoreItem
from areal.types import Purpose, Task, WorkflowSpec
from areal_launch.commands.inspect import show_token

RECIPE = """
from pathlib import Path

def reward_fn(prompt, completion, **_):
    Path({mark!r}).write_text("as the owner")
    return 0.0

def main(argv):
    pass
"""
KWARGS = {"reward_fn": {"$function": "reward_fn"}, "gconfig": {"max_new_tokens": 2}}


class Attacks:
    """Each public method is one; it returns what was got, and raises when it was refused."""

    def __init__(self, run_dir: Path, stack: dict[str, Any], store: str, mark: str) -> None:
        self._run_dir = run_dir
        self._stack = stack
        self._store = store
        self._mark = mark

    def _address(self, name: str, key: str = "address") -> str:
        return str(self._stack["processes"][name][key])

    async def put_recipe(self) -> Any:
        client = BufferClient(self._address("buffer"), retry_s=0)
        try:
            source = RECIPE.format(mark=self._mark).encode()
            return await client.put_recipe("evil.py", source)
        finally:
            await client.close()

    async def submit_tasks(self) -> Any:
        digest = await self._or_nothing(self.put_recipe)
        client = RolloutClient(self._address("rollout-0"), retry_s=0)
        try:
            workflow = WorkflowSpec("rlvr", digest, json.dumps(KWARGS))
            row = {"prompt": "1+1=", "answer": "2"}
            task = Task("stranger", Purpose.SERVE, workflow, row)
            accepted = await client.submit_tasks([task])
            async for _ in client.watch_tasks(["stranger"], timeout=60):
                break
            return accepted
        finally:
            await client.close()

    async def score(self) -> Any:
        client = RewardClient(self._address("reward"), retry_s=0)
        try:
            return await client.score("math", "", {}, [ScoreItem("1+1=", "2")])
        finally:
            await client.close()

    async def list_servers(self) -> Any:
        client = WeightSyncClient(self._address("weight-sync"))
        try:
            return await client.list_servers()
        finally:
            await client.close()

    def read_config(self) -> Any:
        return (self._run_dir / "config.yaml").read_text()

    def read_the_stack(self) -> Any:
        return (self._run_dir / "stack.json").read_text()

    def read_token(self) -> Any:
        return (self._run_dir / "secrets" / "token").read_text()

    def list_secrets(self) -> Any:
        return [str(file) for file in (self._run_dir / "secrets").iterdir()]

    def ask_the_command_for_the_token(self) -> Any:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            try:
                show_token(self._run_dir)
            except NotFound as error:  # to a stranger it does not run
                raise PermissionError(str(error)) from None
        return printed.getvalue()

    def read_an_environment(self) -> Any:
        pid = self._stack["processes"]["buffer"]["pid"]
        return Path(f"/proc/{pid}/environ").read_bytes()

    def command_the_launcher(self) -> Any:
        with socket.socket(socket.AF_UNIX) as connection:
            try:
                connection.connect(str(self._run_dir / "control.sock"))
            except PermissionError:
                raise PermissionError("control.sock") from None
            return "connected"

    def ask_redis(self) -> Any:
        return self._say("redis", b"INFO\r\n", refusal=b"-NOAUTH")

    def ask_nats(self) -> Any:
        hello = b'CONNECT {"verbose":true}\r\nPING\r\n'
        return self._say("nats", hello, refusal=b"Authorization Violation")

    def read_the_status(self) -> Any:
        return self._http(f"{self._address('gateway')}/v1/status")

    def read_waits(self) -> Any:
        return self._http(f"{self._address('buffer', 'metrics')}/waits")

    def pause_generation(self) -> Any:
        return self._http(f"{self._address('inference-0')}/pause_generation", b"{}")

    def read_weights(self) -> Any:
        return self._http(f"{self._store}/versions/v00000000-inc0")

    def _http(self, address: str, body: bytes | None = None) -> str:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"http://{address}", body, headers)
        try:
            with urllib.request.urlopen(request, timeout=20) as reply:
                return f"{reply.status} {reply.read(200)!r}"
        except urllib.error.HTTPError as error:
            if error.code == 401:
                raise PermissionError("HTTP 401") from None
            return str(error.code)

    def _say(self, name: str, text: bytes, refusal: bytes) -> str:
        host, _, port = self._address(name).rpartition(":")
        with socket.create_connection((host, int(port)), 20) as connection:
            connection.sendall(text)
            heard = b""
            while refusal not in heard:
                if not (part := connection.recv(4096)) or len(heard) > 1 << 20:
                    return repr(heard[:200])
                heard += part
                if heard.startswith(b"$") or b"PONG" in heard:
                    return repr(heard[:200])
        raise PermissionError(refusal.decode())

    @staticmethod
    async def _or_nothing(attack: Callable[[], Any]) -> str:
        try:
            return str(await attack())
        except Unauthenticated:
            return ""


async def main(attacks: Attacks) -> dict[str, str]:
    """Tries everything."""
    outcomes = {}
    for name in [name for name in vars(Attacks) if not name.startswith("_")]:
        try:
            got = getattr(attacks, name)()
            if inspect.isawaitable(got):
                got = await got
            outcomes[name] = f"got in: {str(got)[:200]}"
        except Unauthenticated:
            outcomes[name] = "refused: no token"
        except PermissionError as error:
            outcomes[name] = f"refused: {error.filename or error}"
        except ArealError as error:
            outcomes[name] = f"got in, as far as an answer: {error}"
    return outcomes


def become(uid: int) -> None:
    """The user that tries; gives up everything else."""
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)


if __name__ == "__main__":
    run_dir, store, mark = Path(sys.argv[2]), sys.argv[3], sys.argv[4]
    # Where everything listens is no secret: anybody can look at the machine's ports.
    stack = json.loads((run_dir / "stack.json").read_text())
    # Python loads some modules when they are first needed, and may then not read them any more.
    asyncio.run(main(Attacks(run_dir, stack, store, mark="/dev/null")))
    become(int(sys.argv[1]))
    print(json.dumps(asyncio.run(main(Attacks(run_dir, stack, store, mark)))))
