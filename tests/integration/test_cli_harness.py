"""Coding agents of the command line work unmodified: `make test-harness`.

The model's answers are scripted, so that the agent really runs commands and ends its task. Once
more, an engine samples them (the CPU engine, and SGLang), and the agent reaches it by a gateway.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from tests.contract.engines import ENGINES, running_spelling
from tests.integration.calling_model import FILE, make_calling_model
from tests.integration.wired_gateway import check_sampled, wired_gateway
from tests.unit.areal.agents.scripted_model import Scripted, check_exact, serving

from areal.agents.command import run_command
from areal.tokenizer import Tokenizer

FOLDER = Path(os.environ.get("AREAL_TEST_HARNESS", ""))
MINI = str(FOLDER / "bin" / "mini")
CLAUDE = str(FOLDER / "node_modules/@anthropic-ai/claude-code-linux-x64/claude")
CODEX = str(FOLDER / "node_modules/.bin/codex")
pytestmark = pytest.mark.skipif(
    not os.environ.get("AREAL_TEST_HARNESS"), reason="needs other packages: make test-harness"
)
TASK = "Write hello-42 to made.txt."

# The second answer makes two calls: they run in order.
LOOK = """I look.
<tool_call>
{"name": "bash", "arguments": {"command": "echo hello-$((6*7)) > made.txt"}}
</tool_call>"""
READ = """It is there.
<tool_call>
{"name": "bash", "arguments": {"command": "cat made.txt"}}
</tool_call>
<tool_call>
{"name": "bash", "arguments": {"command": "ls"}}
</tool_call>"""
DONE = """Done.
<tool_call>
{"name": "bash", "arguments": {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}}
</tool_call>"""

MINI_TASK = [MINI, "--yolo", "--exit-immediately", "--model", "openai/any", "--cost-limit", "0"]
MINI_TASK += ["--task", TASK, "--output", "log.json"]
MINI_SETTINGS = {"MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors"}


@pytest.mark.timeout(300)
async def test_mini_swe_agent_when_run_then_its_task_is_done_and_its_tokens_are_exact(tmp_path):
    scripted = Scripted(LOOK, READ, DONE)
    async with serving(scripted) as (url, key, _, calls):
        result = await run_command(
            MINI_TASK, url, key, timeout_s=240.0, folder=tmp_path, environment=MINI_SETTINGS
        )
    assert result.exit_code == 0, result.output
    assert (tmp_path / "made.txt").read_text() == "hello-42\n"
    [trajectory] = check_exact(calls, scripted, chains=[[0, 1, 2]])
    text = scripted.tokenizer.decode(trajectory.input_ids.tolist())
    assert "hello-42" in text.rpartition("It is there.")[2], "what the commands wrote"


def doing(tool, **arguments):
    """An answer that calls a tool."""
    call = json.dumps({"name": tool, "arguments": arguments})
    return f"I do it.\n<tool_call>\n{call}\n</tool_call>"


async def finished(scripted, command, folder, settings, url, key, calls):
    result = await run_command(
        command, url, key, timeout_s=240.0, folder=folder, environment=settings
    )
    assert result.exit_code == 0, result.output
    assert "It is written." in result.output
    assert (folder / "made.txt").read_text() == "hello-42\n"
    check_exact(calls, scripted, chains=[[0, 1]])


@pytest.mark.timeout(300)
async def test_claude_code_when_run_then_its_task_is_done_and_its_tokens_are_exact(tmp_path):
    """By Anthropic's messages, streamed."""
    write = doing("Bash", command="echo hello-$((6*7)) > made.txt", description="Writes it")
    scripted = Scripted(write, "It is written.")
    command = [CLAUDE, "-p", TASK, "--dangerously-skip-permissions", "--model", "any"]
    settings = {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "IS_SANDBOX": "1"}
    async with serving(scripted) as (url, key, _, calls):
        await finished(scripted, command, tmp_path, settings, url, key, calls)


@pytest.mark.timeout(300)
async def test_codex_when_run_then_its_task_is_done_and_its_tokens_are_exact(tmp_path):
    """By OpenAI's responses, streamed."""
    write = doing("exec_command", cmd="echo hello-$((6*7)) > made.txt")
    scripted = Scripted(write, "It is written.")
    command = [CODEX, "exec", "--disable", "multi_agent", "--skip-git-repo-check"]
    command += ["--dangerously-bypass-approvals-and-sandbox", TASK]
    async with serving(scripted) as (url, key, _, calls):
        (tmp_path / "config.toml").write_text(
            'model = "any"\nmodel_provider = "run"\nweb_search = "disabled"\n'
            f'[model_providers.run]\nname = "run"\nbase_url = "{url}"\n'
            'env_key = "OPENAI_API_KEY"\nwire_api = "responses"\n'
        )
        settings = {"CODEX_HOME": str(tmp_path)}
        await finished(scripted, command, tmp_path, settings, url, key, calls)


CONTEXT, STEPS = 16384, 3


@pytest.fixture(scope="module", params=ENGINES)
def gateway(request, tmp_path_factory):
    """A gateway before an engine that samples calls, and the model's tokenizer."""
    folder = tmp_path_factory.mktemp("harness")
    model = folder / "model"
    make_calling_model(model, CONTEXT)
    flags = ("--context-length", str(CONTEXT))
    with (
        running_spelling(request.param, model, folder / "server.log", *flags) as (engine, _),
        wired_gateway(engine, model, folder / "stack", context=CONTEXT, most=1024) as wired,
    ):
        yield wired, Tokenizer.load(model)


@pytest.mark.timeout(1500)
async def test_mini_swe_agent_when_a_real_engine_answers_then_what_it_sampled_is_recorded(
    gateway, tmp_path
):
    wired, known = gateway
    opened = await wired.open(TASK)
    result = await run_command(
        [*MINI_TASK, "--config", "mini.yaml", "--config", f"agent.step_limit={STEPS}"],
        opened["base_url"],
        opened["api_key"],
        timeout_s=600.0,
        folder=tmp_path,
        environment=MINI_SETTINGS,
    )
    assert result.exit_code == 0, result.output
    [trajectory] = await wired.end(opened, 0.5)
    sampled = wired.wire.sampled
    assert len(sampled) == STEPS
    check_sampled([trajectory], sampled)
    assert trajectory.input_ids.tolist() == sampled[-1].prompt + sampled[-1].ids
    # The agent did what was sampled, turn by turn.
    spoken = [known.decode(each.ids) for each in sampled]
    numbers = re.findall(rf'"echo (\d+) >> {FILE}"', "".join(spoken))
    assert len(numbers) == STEPS, spoken
    assert (tmp_path / FILE).read_text().split() == numbers
