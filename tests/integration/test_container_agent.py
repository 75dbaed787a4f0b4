"""An agent in a container, as docs/agents.md starts one with `docker run`."""

from __future__ import annotations

import subprocess

import pytest
from tests.unit.areal.agents.scripted_model import Scripted, check_exact, serving

from areal.agents.command import run_command

IMAGE = "python:3.11-slim"
AGENT = """
import json, os, urllib.request
body = {"model": "any", "messages": [{"role": "user", "content": "12+34="}]}
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps(body).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
)
with urllib.request.urlopen(request, timeout=60) as answer:
    print(json.load(answer)["choices"][0]["message"]["content"])
"""
RUN = ["docker", "run", "--rm", "--init", "--network", "host"]
RUN += ["--env", "OPENAI_BASE_URL", "--env", "OPENAI_API_KEY", IMAGE]


def has_image() -> bool:
    try:
        found = subprocess.run(
            ["docker", "image", "inspect", IMAGE], capture_output=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return found.returncode == 0


@pytest.mark.timeout(300)
async def test_run_command_when_it_is_docker_run_then_the_agent_in_it_is_trained():
    if not has_image():
        pytest.skip(f"needs a Docker engine with the image {IMAGE}")
    scripted = Scripted("46.")
    async with serving(scripted) as (url, key, _, calls):
        result = await run_command([*RUN, "python3", "-c", AGENT], url, key, timeout_s=120)
        assert (result.exit_code, result.output) == (0, "46.\n")
        late = await run_command([*RUN, "timeout", "1", "sleep", "60"], url, key, timeout_s=120)
        assert late.exit_code == 124
    check_exact(calls, scripted, chains=[[0]])
