"""A service that ends itself by kill -9 at a chosen moment of a session's call.

    python -m tests.chaos.mortal FILE areal_rollout --config …

It dies at the moment that FILE names, once there is such a file. A kill from outside would hardly
ever meet the milliseconds between two writes.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any

from areal.clients.buffer.sessions import BufferSessions
from areal.clients.rollout import RolloutClient

OF_WORKERS = (
    *("before begin", "after begin", "before record", "after record"),
    *("before reward", "after reward", "before end", "after end"),
)
"""Beside each write of a rollout worker. "before record": the answer was sampled."""
OF_GATEWAYS = ("before the answer", "before delivered", "after delivered")
"""Before an answer leaves for its agent; and before or after it is recorded that it left."""


def main() -> None:
    """Runs the module that the arguments name."""
    _, file, module, *arguments = sys.argv
    chosen = Path(file)

    def reached(moment: str) -> None:
        # The process that writes the file renames it into place, so it is whole.
        if chosen.exists() and chosen.read_text() == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    update, call_session = BufferSessions.update, RolloutClient.call_session

    async def mortal_update(self: BufferSessions, request: Any) -> Any:
        kind = request.WhichOneof("change")
        reached(f"before {kind}")
        answer = await update(self, request)
        reached(f"after {kind}")
        return answer

    async def mortal_call(self: RolloutClient, request: Any, **more: Any) -> AsyncGenerator[Any]:
        async with aclosing(call_session(self, request, **more)) as replies:
            async for reply in replies:
                if reply.receipt:
                    reached("before the answer")
                yield reply

    BufferSessions.update = mortal_update  # type: ignore[method-assign]
    RolloutClient.call_session = mortal_call  # type: ignore[method-assign,assignment]
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
