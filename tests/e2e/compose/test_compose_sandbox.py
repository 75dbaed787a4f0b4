"""The profile `sandbox`: boxes of namespaces, made in a container without privileges."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.compose.stack import Project

ROOT = Path(__file__).resolve().parents[3]
USER = """
import asyncio
from pathlib import Path
from areal.clients.sandbox import SandboxClient
from areal.config.experiment import load_service_config
from areal.security import Security

async def main():
    config = load_service_config(Path("/data/config.yaml"), [])
    client = SandboxClient(config.endpoints.sandbox, Security.load(config.security))
    async with await client.lend() as box:
        shared = client.box(box.id, box.address)
        await box.write("a", b"kept")
        look = "echo user $(id -u) file $(cat a) processes $(ls -d /proc/[0-9]* | wc -l); "
        look += "ls /data /secrets; grep -c : /proc/net/dev; ls /sys"
        outcome = await shared.run(argv=["sh", "-c", look])
        print(outcome.stdout, outcome.stderr)
    await client.close()

asyncio.run(main())
"""


@pytest.fixture
def project() -> Iterator[Project]:
    project = Project(
        ROOT,
        "areal-e2e-sandbox",
        AREAL_TAG="e2e",
        AREAL_ARGS="sandbox.boxes=2",
        COMPOSE_PROFILES="sandbox",
    )
    try:
        yield project
    finally:
        project.compose("down", "--volumes", "--timeout", "10", check=False)


@pytest.mark.timeout(3600)
def test_compose_when_the_profile_is_on_then_a_box_is_lent_that_shows_nothing(
    project: Project,
) -> None:
    project.compose("build", "init", "sandbox", timeout=3600)
    project.compose("up", "--detach", "--wait", "sandbox", timeout=900)
    command = ("run", "--rm", "-T", "--no-deps", "--entrypoint", "python", "trainer", "-c", USER)
    said = project.compose(*command)
    assert "user 65534 file kept" in said, said
    assert "'/data': No such file" in said, said
    assert "'/secrets': No such file" in said, said
    assert "\n1\n" in said, "an interface beside the loopback:\n" + said
