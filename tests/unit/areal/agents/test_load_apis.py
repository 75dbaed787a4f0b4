"""The SDKs' types are imported before the first request, and not with the routes."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import cast

from areal.agents import routes
from areal.agents.session import Session

SCRIPT = """
import sys
from areal.agents.routes import load_apis
assert not {"openai", "anthropic"} & set(sys.modules), "imported with the routes"
load_apis()
known = set(sys.modules)
from areal.agents import anthropic_messages, openai_chat, openai_responses, openai_text
from areal.agents import responses_stream
print(sorted(set(sys.modules) - known))
"""


def test_apis_when_loaded_then_no_route_imports_anything_more():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


async def test_first_request_when_the_sdk_is_not_imported_then_a_thread_imports_it(monkeypatch):
    threads = []

    def note() -> None:
        threads.append(threading.current_thread())

    async def find(key: str) -> Session:
        return cast(Session, None)

    monkeypatch.setattr(routes, "load_apis", note)
    monkeypatch.setattr(routes, "_LAST", "areal.agents.not_imported")
    reply = await routes.handle(find, "POST", "/v1/chat/completions", {}, b"{}")
    assert reply.status == 400
    assert threads
    assert threads[0] is not threading.main_thread()
