"""Foreign clients, unchanged, against a session's endpoint: `make test-clients`.

Each client makes a conversation of two answers, which must become one trajectory of exactly the
sampled ids (one per answer if the client rewrites its history). Then it meets a prompt that is too
long, which it must recognize in its own way.

Once more, an engine samples the answers (the CPU engine; with AREAL_TEST_SGLANG=1, SGLang too), and
the client reaches it by a gateway.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
from pathlib import Path

import pytest
from tests.contract.engines import ENGINES, running_spelling
from tests.integration.calling_model import ADD, make_calling_model
from tests.integration.wired_gateway import check_sampled, wired_gateway
from tests.unit.areal.agents.scripted_model import Scripted, check_exact, serving

from areal.errors import PromptTooLong
from areal.tokenizer import Tokenizer

FOLDER = Path(os.environ.get("AREAL_TEST_CLIENTS", ""))
TALK = Path(__file__).parents[1] / "clients"
pytestmark = pytest.mark.skipif(
    not os.environ.get("AREAL_TEST_CLIENTS"), reason="needs other packages: make test-clients"
)

CALL = 'I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
TOOLS = (CALL, "It is 3.")
CODE = (
    "I add.\n<code>\nx = 1 + 2\nprint(x)\n</code>",
    "I know it.\n<code>\nfinal_answer('It is 3.')\n</code>",
)
FIELDS = ("[[ ## answer ## ]]\nIt is 3.\n\n[[ ## completed ## ]]",)
# Client -> what the model says, the text that the client returns, how it names a long prompt.
CLIENTS = {
    "openai_chat": (TOOLS, "It is 3.", "context_length_exceeded"),
    "openai_agents": (TOOLS, "It is 3.", "BadRequestError"),
    "anthropic": (TOOLS, "It is 3.", "prompt is too long"),
    "langchain_openai": (TOOLS, "It is 3.", "ContextOverflowError"),
    "langchain_responses": (TOOLS, "It is 3.", "ContextOverflowError"),
    "langchain_anthropic": (TOOLS, "It is 3.", "ContextOverflowError"),
    "litellm": (TOOLS, "It is 3.", "ContextWindowExceededError"),
    "pydantic_ai": (TOOLS, "It is 3.", "context_length_exceeded"),
    "smolagents": (CODE, "It is 3.", "BadRequestError"),
    "dspy": (FIELDS, "It is 3.", "Context"),
    "inspect": (TOOLS, "It is 3.", "model_length"),
    "openai_node": (TOOLS, "It is 3.", "context_length_exceeded"),
    "ai_sdk": (TOOLS, "It is 3.", "maximum context length"),
}
# It appends "Calling tools: …" to each answer that it keeps: docs/agents.md.
REWRITES = ("smolagents",)
IN_NODE = ("openai_node", "ai_sdk")


class Limited(Scripted):
    """Has no room for a prompt once all its answers are sampled."""

    async def generate(self, request):
        if not self.answers:
            raise PromptTooLong("input_ids: no room", tokens=90, limit=50)
        return await super().generate(request)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("client", CLIENTS)
async def test_client_when_its_agent_is_run_then_one_exact_trajectory_and_overflow_is_known(client):
    if client in IN_NODE and not shutil.which("node"):
        pytest.skip(f"{client}: needs node")
    answers, text, overflow = CLIENTS[client]
    scripted = Limited(*answers)
    async with serving(scripted) as (url, key, _, calls):
        told = await talk(client, url, key)
    assert told["text"] == text
    assert overflow in told["overflow"]
    every = list(range(len(answers)))
    if client in REWRITES:
        assert calls.merged(1.0).chains == [[number] for number in every]
    else:
        check_exact(calls, scripted, chains=[every])


async def talk(client, url, key):
    """What a client says of its conversation, and of a prompt that is too long."""
    command = [str(FOLDER / "bin" / "python"), str(TALK / "talk.py")]
    if client in IN_NODE:
        # Node looks for packages beside the file.
        script = FOLDER / "talk.mjs"
        script.write_text((TALK / "talk.mjs").read_text(encoding="utf-8"), encoding="utf-8")
        command = ["node", str(script)]
    process = await asyncio.create_subprocess_exec(
        *command, client, url.removesuffix("/v1") if "anthropic" in client else url, key,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        env={"PATH": os.environ["PATH"], "HOME": str(FOLDER), "AREAL_API_KEY": key},
    )  # fmt: skip
    out, err = await asyncio.wait_for(process.communicate(), 240)
    assert process.returncode == 0, err.decode()[-3000:]
    return json.loads(out.decode().splitlines()[-1])


CONTEXT = 4096


@pytest.fixture(scope="module", params=ENGINES)
def gateway(request, tmp_path_factory):
    """A gateway before an engine that samples calls, and the model's tokenizer."""
    folder = tmp_path_factory.mktemp("clients")
    model = folder / "model"
    make_calling_model(model, CONTEXT, ADD)
    flags = ("--context-length", str(CONTEXT))
    with (
        running_spelling(request.param, model, folder / "server.log", *flags) as (engine, _),
        wired_gateway(engine, model, folder / "stack", context=CONTEXT, most=512) as wired,
    ):
        yield wired, Tokenizer.load(model)


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("client", [name for name, of in CLIENTS.items() if of[0] is TOOLS])
async def test_client_when_a_real_engine_answers_then_what_it_sampled_is_recorded(client, gateway):
    if client in IN_NODE and not shutil.which("node"):
        pytest.skip(f"{client}: needs node")
    wired, known = gateway
    before = len(wired.wire.sampled)
    opened = await wired.open("add")
    told = await talk(client, opened["base_url"], opened["api_key"])
    trajectories = await wired.end(opened, 0.5)
    sampled = wired.wire.sampled[before:]
    check_sampled(trajectories, sampled)
    call, answer, *_ = (known.decode(each.ids, skip_special_tokens=True) for each in sampled)
    assert re.search(r'"a": 1\d+, "b": 2', call)
    assert told["text"] == answer
    # The second prompt has the sampled call as it was sampled, and the sum.
    a = int(re.search(r'"a": (\d+)', call)[1])
    first, second = sampled[:2]
    assert second.prompt[: len(first.prompt) + len(first.ids)] == first.prompt + first.ids
    assert str(a + 2) in known.decode(second.prompt)
