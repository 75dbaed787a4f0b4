"""The sandbox service with TLS and a token: its leases can be used, its secrets not be read."""

from __future__ import annotations

import asyncio
import ctypes
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.certificates import Authority
from tests.integration.test_sandbox import REASON
from tests.service_process import ROOT, service_process

from areal.clients.sandbox import SandboxClient
from areal.config.experiment import load_service_config
from areal.errors import ConfigError
from areal.sandbox import Sandbox
from areal.security import Security
from areal_sandbox.config import SandboxConfig, check_secrets

TOKEN = "0123456789abcdef-token"
LANDLOCK = ctypes.CDLL(None).syscall(444, None, 0, 1)  # its version; -1: the kernel has none
OPEN = "import sys\nfor name in sys.stdin.read().split():\n print(open(name).read(9))"


@pytest.mark.skipif(bool(REASON), reason=REASON or "boxes work")
async def test_lease_when_its_address_is_none_of_the_certificates_names_then_it_is_used(tmp_path):
    """In a cluster a pod's address is in no certificate, and the service's name is."""
    folder = Authority.make(tmp_path / "pki").tls_dir("areal")
    files = {"sandbox": {"boxes": 1}, "security": {"tls_dir": str(folder)}}
    async with service_process(
        "areal_sandbox",
        tmp_path,
        str(files),
        host="0.0.0.0",
        environment={"AREAL_TOKEN": TOKEN},
    ) as service:
        config = load_service_config(tmp_path / "areal_sandbox.yaml", []).security
        security = Security.load(config, {"AREAL_TOKEN": TOKEN})
        port = service.listen.rpartition(":")[2]
        client = SandboxClient(f"localhost:{port}", security)
        lent = await client.lend()
        shared = client.box(lent.id, f"127.0.0.2:{port}")  # which the certificate lacks
        assert (await shared.run("print(1)")).stdout == "1\n"
        assert await shared.kill()
        await client.close()


@pytest.fixture
def readable() -> Iterator[Path]:
    """A folder with a key that every user may read: boxes of a root service run as `nobody`."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "tls.key").write_text("key")
        (folder / "tls.key").chmod(0o644)
        yield folder


@pytest.mark.skipif(LANDLOCK < 1, reason="needs Linux 5.13 with Landlock")
async def test_program_when_it_has_no_namespaces_then_it_reads_no_file_of_the_machine(readable):
    sandbox = Sandbox(slots=1, isolation="rlimits")
    for name in (str(readable / "tls.key"), "/etc/passwd", __file__):
        outcome = await sandbox.run(OPEN, stdin=name)
        assert "PermissionError" in outcome.stderr, (name, outcome)
    outcome = await sandbox.run(  # what it needs is there
        "import pathlib, subprocess, tempfile\n"
        "subprocess.run(['sh', '-c', 'mkdir a && echo 1 > a/b && mv a/b c'], check=True)\n"
        "tempfile.TemporaryFile().write(b'x')\n"
        "print(pathlib.Path('c').read_text().strip(), open('/dev/null').read() == '')"
    )
    assert outcome.stdout == "1 True\n", outcome


@pytest.mark.skipif(LANDLOCK < 6, reason="needs Linux 6.12 with Landlock")
async def test_program_when_it_has_no_namespaces_then_it_signals_no_process_of_its_user():
    user = 65534 if os.getuid() == 0 else os.getuid()
    other = await asyncio.create_subprocess_exec("sleep", "60", user=user)
    try:
        outcome = await Sandbox(slots=1, isolation="rlimits").run(
            f"import os\ntry: os.kill({other.pid}, 0)\nexcept OSError as e: print(e)"
        )
        assert "not permitted" in outcome.stdout
    finally:
        other.kill()
        await other.wait()


def test_service_when_programs_could_read_a_key_then_it_refuses(readable, monkeypatch):
    config = SandboxConfig(isolation="rlimits", secrets=(str(readable / "tls.key"),))
    monkeypatch.setattr("areal_sandbox.config.hides_files", lambda: True)
    check_secrets(config)
    monkeypatch.setattr("areal_sandbox.config.hides_files", lambda: False)
    with pytest.raises(ConfigError, match=r"sandbox.isolation rlimits: .*tls.key.* Landlock"):
        check_secrets(config)
    check_secrets(SandboxConfig(isolation="namespaces", secrets=config.secrets))
    check_secrets(SandboxConfig(isolation="rlimits"))


def test_environment_when_secrets_are_forgotten_then_proc_shows_none():
    code = (
        "import os\nfrom areal_sandbox.config import forget_secrets\nforget_secrets()\n"
        "print(open('/proc/self/environ').read(), os.environ)"
    )
    environment = os.environ | {
        "AREAL_TOKEN": TOKEN,
        "KEPT": "kept",
        "PYTHONPATH": str(ROOT / "services"),
    }
    command = [sys.executable, "-c", code]
    shown = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert TOKEN not in shown.stdout
    assert shown.stdout.count("kept") == 2


def test_config_when_read_then_it_names_the_files_with_secrets(tmp_path):
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "tls").mkdir()
    (tmp_path / "tls" / "tls.key").write_text("key")
    file = tmp_path / "x.yaml"
    file.write_text(
        f"sandbox: {{boxes: 1}}\nsecurity: {{dir: '{tmp_path}', tls_dir: '{tmp_path}/tls'}}"
    )
    found = SandboxConfig.from_experiment(load_service_config(file, [])).secrets
    assert found == (f"{tmp_path}/token", f"{tmp_path}/tls/tls.key")
