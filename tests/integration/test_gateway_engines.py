"""SDKs drive sessions at a gateway, and real engines answer: what is recorded is what was sampled.

`make test-sglang` runs it on SGLang as well. The agents are those of test_agent_sessions.
"""

from __future__ import annotations

import asyncio
import json

import pytest
from tests.contract.engines import ENGINES, running_spelling
from tests.integration.test_agent_sessions import (
    TEMPLATE,
    chat_tool_agent,
    message_tool_agent,
    response_tool_agent,
    token_agent,
)
from tests.integration.wired_gateway import check_sampled, wired_gateway

from areal_torch.models.tiny import make_tiny_model


@pytest.fixture(scope="module", params=ENGINES)
def gateway(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("gateway")
    model = make_tiny_model(folder / "model", num_hidden_layers=1)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    settings["chat_template"] = TEMPLATE
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    with (
        running_spelling(request.param, model, folder / "server.log") as (engine, _),
        wired_gateway(engine, model, folder / "stack", context=2048, most=400) as wired,
    ):
        yield wired


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("run", "answers", "trajectories"),
    [
        (chat_tool_agent, 4, 2),
        (response_tool_agent, 3, 1),
        (message_tool_agent, 2, 1),
        (token_agent, 3, 1),
    ],
)
async def test_session_when_an_engine_answers_then_what_it_sampled_is_recorded(
    gateway, run, answers, trajectories
):
    before = len(gateway.wire.sampled)
    task = {"question": "12+34="}
    opened = await gateway.open(task["question"])
    async with asyncio.timeout(240):
        reward = await run(task, opened["base_url"], opened["api_key"])
    found = await gateway.end(opened, reward)
    sampled = gateway.wire.sampled[before:]
    assert (len(sampled), len(found)) == (answers, trajectories)
    check_sampled(found, sampled)
