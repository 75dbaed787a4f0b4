"""mini-swe-agent, a coding agent of the command line, works unmodified: `make test-harness`.

The model's answers are scripted, so that the agent really runs commands and ends its task.
"""

from __future__ import annotations

import os

import pytest
from tests.unit.areal.agents.scripted_model import Scripted, check_exact, serving

from areal.agents.command import run_command

MINI = os.environ.get("AREAL_TEST_HARNESS", "")
pytestmark = pytest.mark.skipif(not MINI, reason="needs mini-swe-agent: make test-harness")

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


@pytest.mark.timeout(300)
async def test_mini_swe_agent_when_run_then_its_task_is_done_and_its_tokens_are_exact(tmp_path):
    scripted = Scripted(LOOK, READ, DONE)
    command = [MINI, "--yolo", "--exit-immediately", "--model", "openai/any"]
    command += [
        "--cost-limit",
        "0",
        "--task",
        "Write hello-42 to made.txt.",
        "--output",
        "log.json",
    ]
    settings = {"MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors"}
    async with serving(scripted) as (url, key, _, calls):
        result = await run_command(
            command, url, key, timeout_s=240.0, folder=tmp_path, environment=settings
        )
    assert result.exit_code == 0, result.output
    assert (tmp_path / "made.txt").read_text() == "hello-42\n"
    [trajectory] = check_exact(calls, scripted, chains=[[0, 1, 2]])
    text = scripted.tokenizer.decode(trajectory.input_ids.tolist())
    assert "hello-42" in text.rpartition("It is there.")[2], "what the commands wrote"
