"""One service each, with a token or with mutual TLS alone; and what refuses to start."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import aiohttp
import grpc
import pytest
from tests.buffer_client import BufferClient
from tests.certificates import Authority
from tests.integration.stack_tools import areal
from tests.integration.test_auth_stack import TOKEN, WRONG, code_of, methods_of
from tests.redis_server import start_redis
from tests.service_process import ServiceProcess, free_port, service_process

from areal.chassis.service import Server, ServiceContext, check_address, listen_in
from areal.clients.trainer import TrainerClient
from areal.errors import ConfigError, Unauthenticated, Unavailable
from areal.runs.status import TrainerStatus
from areal.security import Security, SecurityConfig
from areal.v1 import trainer_service_pb2
from areal_trainer.server import TrainerServer
from areal_trainer.servicer import TrainerService


async def test_trainer_when_called_without_the_token_then_unauthenticated() -> None:
    server = TrainerServer(TrainerService(TrainerStatus(10, 1)))
    address, metrics = (f"127.0.0.1:{free_port()}" for _ in range(2))
    context = ServiceContext("trainer", address, None, Security(token=TOKEN))
    listeners = await listen_in(context, server, metrics)
    try:
        async with grpc.aio.insecure_channel(address) as channel:
            for path, stream in methods_of(trainer_service_pb2):
                assert not stream
                for header in (None, WRONG):
                    metadata = [("authorization", header)] if header else None
                    with pytest.raises(grpc.aio.AioRpcError) as caught:
                        await channel.unary_unary(path)(b"", metadata=metadata, timeout=60)
                    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        for security, admitted in ((Security(token=TOKEN), True), (None, False)):
            client = TrainerClient(address, security)
            if admitted:
                assert (await client.get_status(0)).total_steps == 10
            else:
                with pytest.raises(Unauthenticated, match="AREAL_TOKEN"):
                    await client.get_status(0)
            await client.close()
        async with aiohttp.ClientSession() as http, http.get(f"http://{metrics}/metrics") as reply:
            assert reply.status == 401
        refused = context.registry.get_sample_value
        assert refused("areal_trainer_unauthenticated_total", {"protocol": "grpc"}) == 3
        assert refused("areal_trainer_unauthenticated_total", {"protocol": "http"}) == 1
    finally:
        await listeners.stop(0)
    for each in (address, metrics):  # another process may have them
        check_address(each, "--listen", Security())


def buffer_config(redis: str, **security: Path | str) -> str:
    lines = "".join(f"  {key}: '{value}'\n" for key, value in security.items())
    return f"endpoints:\n  redis: '{redis}'\nsecurity:\n{lines}"


async def stats_with(service: ServiceProcess, security: Security | None) -> int:
    client = BufferClient(service.listen, security, timeout_s=60.0)
    try:
        return (await client.get_stats()).submitted
    finally:
        await client.close()


async def test_mutual_tls_when_a_peer_has_no_certificate_of_ours_then_no_connection(
    tmp_path: Path,
) -> None:
    ours, theirs = Authority.make(tmp_path / "ours"), Authority.make(tmp_path / "theirs")
    client, stranger = ours.tls_dir("client"), theirs.tls_dir("stranger")

    def security(folder: Path, ca: Path) -> Security:
        (folder / "ca.crt").write_bytes(ca.read_bytes())
        return Security.load(SecurityConfig(tls_dir=str(folder)), {})

    with start_redis(tmp_path) as redis:
        config = buffer_config(redis, tls_dir=ours.tls_dir("buffer"))
        async with service_process("areal_buffer", tmp_path, config) as service:
            assert await stats_with(service, security(client, ours.ca)) == 0
            with pytest.raises(Unavailable):  # in the clear
                await stats_with(service, None)
            with pytest.raises(Unavailable):  # trusts the server, but no one knows it
                await stats_with(service, security(stranger, ours.ca))
            with pytest.raises(Unavailable):  # does not trust the server
                await stats_with(service, security(client, theirs.ca))
            anonymous = grpc.ssl_channel_credentials(ours.ca.read_bytes())
            with closing(grpc.secure_channel(service.listen, anonymous)) as channel:
                health = "/grpc.health.v1.Health/Check"
                assert code_of(channel, health, False, None) is grpc.StatusCode.UNAVAILABLE


async def test_redis_password_when_wrong_then_one_line_that_does_not_hold_it(
    tmp_path: Path,
) -> None:
    password = tmp_path / "secrets" / "redis-password"
    password.parent.mkdir()
    password.write_text("not-the-password")
    with start_redis(tmp_path) as redis:
        import redis as redis_library

        with redis_library.Redis.from_url(redis) as connection:
            connection.config_set("requirepass", "the-password")
        config = buffer_config(redis, dir=password.parent)
        with pytest.raises(AssertionError) as caught:
            async with service_process("areal_buffer", tmp_path, config):
                pass
        said = str(caught.value)
        assert "invalid username-password pair" in said
        assert "not-the-password" not in said
        password.write_text("the-password")
        async with service_process("areal_buffer", tmp_path, config) as service:
            assert await stats_with(service, None) == 0


@pytest.mark.parametrize(
    ("module", "arguments", "key"),
    [
        ("areal_buffer", ("--listen", "0.0.0.0:0"), "--listen"),
        ("areal_inference", ("--host", "0.0.0.0", "--port", "0"), "inference.host"),
    ],
)
def test_service_when_it_would_listen_openly_then_refuses_in_one_line(
    tmp_path: Path, module: str, arguments: tuple[str, ...], key: str
) -> None:
    import subprocess
    import sys

    from tests.integration.stack_tools import environment

    config = tmp_path / "config.yaml"
    config.write_text("endpoints:\n  redis: redis://127.0.0.1:1\n")
    extra = ("--config", str(config))
    if module == "areal_inference":
        from areal_torch.models.tiny import make_tiny_model

        extra = ("--model-path", str(make_tiny_model(tmp_path / "model", seed=0)))
    done = subprocess.run(
        [sys.executable, "-m", module, *extra, *arguments],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    [line] = done.stderr.splitlines()[-1:]
    assert f"{key} '0.0.0.0': other machines can reach this address and there is no token" in line
    assert "Traceback" not in done.stderr


async def test_metrics_when_they_would_be_open_to_others_then_refused() -> None:
    context = ServiceContext("trainer", f"127.0.0.1:{free_port()}", None)
    with pytest.raises(ConfigError, match=r"--metrics '0\.0\.0\.0': other machines"):
        await listen_in(context, Server(), f"0.0.0.0:{free_port()}")


async def test_service_when_told_to_listen_openly_then_does(tmp_path: Path) -> None:
    config = "endpoints:\n  redis: ''\nsecurity: {allow_insecure_bind: true}\n"
    async with (
        service_process("areal_gateway", tmp_path, config, host="0.0.0.0") as service,
        aiohttp.ClientSession() as http,
    ):
        port = service.listen.rpartition(":")[2]
        async with http.get(f"http://127.0.0.1:{port}/healthz") as reply:
            assert reply.status == 200


def test_up_when_the_folder_of_secrets_is_missing_then_one_line_and_nothing_started(
    tmp_path: Path,
) -> None:
    from areal_torch.models.tiny import make_tiny_model

    model = make_tiny_model(tmp_path / "model", seed=0)
    refused = areal("up", f"model.path={model}", "security.dir=nowhere", cwd=tmp_path)
    assert refused.returncode == 2
    assert refused.stderr.startswith(
        "areal: security.dir 'nowhere': expected a folder with files of token"
    )
    assert len(refused.stderr.splitlines()) == 1
