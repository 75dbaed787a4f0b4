"""OpenEnv environments by their wire: JSON messages over a WebSocket, a session each."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

import aiohttp

from areal.errors import InvalidInput, Unavailable, WorkflowError
from areal.tokenizer.json_text import dumps, loads

T = TypeVar("T")

CONNECT_TIMEOUT_S = 10.0
MAX_MESSAGE_BYTES = 16 * 2**20


class OpenEnv:
    """An episode on an OpenEnv server; each has a connection, so the server gives it a world.

    Methods block and are called one at a time, except `close`, which ends a call that hangs.
    """

    def __init__(self, url: str, action: str | None = None, observation: str | None = None) -> None:
        """Connects to nothing yet.

        Args:
            url: The server's (`http://127.0.0.1:8000`).
            action: Field of the environment's action that holds the answer's text. Without it, the
                answer has to be a JSON object, which is the action.
            observation: Field of the observation that the model reads. Without it, the model reads
                the whole observation as JSON.

        Raises:
            InvalidInput: Not an http or https URL.
        """
        if not url.startswith(("http://", "https://")):
            raise InvalidInput(f"environment openenv:{url}: expected openenv:http://HOST:PORT")
        self._url = f"{url.rstrip('/')}/ws"
        self._action, self._observation = action, observation
        self._runner = asyncio.Runner()
        self._lock = threading.Lock()
        self._asking: asyncio.Task[Any] | None = None
        self._http: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None

    def reset(self, data: dict[str, Any]) -> str:
        """Resets with the row's fields; the server takes those that the environment knows."""
        said = self._run(self._ask("reset", data))
        return self._read(said)

    def step(self, action: str) -> tuple[str, float, bool]:
        """Sends the answer; one that is no action is told what is expected, and no step is made."""
        if self._action is not None:
            sent: Any = {self._action: action}
        else:
            try:
                sent = loads(action)
            except ValueError:
                sent = None
            if not isinstance(sent, dict):
                return "expected a JSON object", 0.0, False
        said = self._run(self._ask("step", sent))
        return self._read(said), float(said.get("reward") or 0.0), bool(said.get("done"))

    def close(self) -> None:
        """Ends the session on the server; a request that still waits for its answer is given up."""
        if (asking := self._asking) is not None:
            self._runner.get_loop().call_soon_threadsafe(asking.cancel)
        try:
            self._run(self._close())
        finally:
            self._runner.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        with self._lock:  # released at once when `close` cancels
            return self._runner.run(work)

    def _read(self, said: dict[str, Any]) -> str:
        seen = said.get("observation")
        if self._observation is None:
            return json.dumps(seen, ensure_ascii=False)
        if not isinstance(seen, dict) or self._observation not in seen:
            known = ", ".join(seen) if isinstance(seen, dict) else type(seen).__name__
            raise InvalidInput(f"observation {self._observation!r}: no such field; known: {known}")
        return str(seen[self._observation])

    async def _ask(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        self._asking = asyncio.current_task()
        try:
            socket = self._socket or await self._connect()
            await socket.send_str(dumps({"type": kind, "data": data}).decode())
            message = await socket.receive()
        except (aiohttp.ClientError, OSError) as error:
            raise Unavailable(f"{self._url}: {kind}: {error}") from None
        finally:
            self._asking = None
        if message.type is not aiohttp.WSMsgType.TEXT:
            raise Unavailable(f"{self._url}: {kind}: the server closed the connection")
        answer = json.loads(message.data)
        said = answer.get("data", {})
        if answer.get("type") == "error":
            detail = said.get("message") if not said.get("errors") else said["errors"]
            raise WorkflowError(f"{self._url}: {kind}: {said.get('code')}: {detail}")
        return dict(said)

    async def _connect(self) -> aiohttp.ClientWebSocketResponse:
        self._http = self._http or aiohttp.ClientSession()
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            self._socket = await self._http.ws_connect(self._url, max_msg_size=MAX_MESSAGE_BYTES)
        return self._socket

    async def _close(self) -> None:
        if self._socket is not None and not self._socket.closed:
            await self._socket.send_str(json.dumps({"type": "close"}))
            await self._socket.close()
        if self._http is not None:
            await self._http.close()
