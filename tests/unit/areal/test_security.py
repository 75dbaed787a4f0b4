"""The token, where it comes from, where a server may listen, and what a log may not say."""

from __future__ import annotations

import io
import logging
from pathlib import Path

import pytest
import structlog

from areal.chassis.logging import configure_logging, get_logger
from areal.clients.redis_connection import connect_redis
from areal.config.experiment import GRPOConfig, build_config
from areal.errors import ConfigError
from areal.security import Security, SecurityConfig, is_loopback, redact, without_secrets

TOKEN = "correct-horse-battery-staple"


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        TOKEN,
        "Bearer",
        "Bearer ",
        f"Basic {TOKEN}",
        f"Bearer {TOKEN}x",
        f"Bearer {TOKEN[:-1]}",
        f"Bearer  {TOKEN}",
        f"Bearer {TOKEN.upper()}",
        "Bearer \udcff\u00e9",
        b"Bearer \xff\xfe",
    ],
)
def test_token_when_absent_or_wrong_then_refused(header: str | bytes | None) -> None:
    assert not Security(token=TOKEN).admits(header)


@pytest.mark.parametrize(
    "header", [f"Bearer {TOKEN}", f"bearer {TOKEN}", b"Bearer " + TOKEN.encode()]
)
def test_token_when_right_then_admitted(header: str | bytes) -> None:
    assert Security(token=TOKEN).admits(header)


def test_token_when_compared_then_by_the_constant_time_function(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared = []

    def compare(left: bytes, right: bytes) -> bool:
        compared.append((left, right))
        return False

    monkeypatch.setattr("areal.security.hmac.compare_digest", compare)
    assert not Security(token=TOKEN).admits(f"Bearer {TOKEN}")
    assert compared == [(TOKEN.encode(), TOKEN.encode())]


def test_token_when_none_is_configured_then_everyone_is_admitted() -> None:
    assert Security().admits(None)
    assert Security().headers() == {}


def test_secrets_when_in_files_and_variables_then_files_win(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    environment = {"AREAL_TOKEN": "another-token-of-enough", "AREAL_REDIS_PASSWORD": "pw"}
    security = Security.load(SecurityConfig(dir=str(tmp_path)), environment)
    assert (security.token, security.redis_password, security.nats_token) == (TOKEN, "pw", "")
    assert security.headers() == {"Authorization": f"Bearer {TOKEN}"}
    assert Security.load(SecurityConfig(), environment).token == "another-token-of-enough"
    assert Security.load(SecurityConfig(), {}) == Security()


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("", "one line of printable"),
        ("two words are no token", "one line of printable"),
        ("two-lines-are-no\ntoken-either", "one line of printable"),
        ("shorty", "a token of 6 characters, expected 16 or more"),
        ("quotes-'are'-not-allowed", "of letters, digits"),
    ],
)
def test_token_file_when_it_holds_no_token_then_one_line_without_its_content(
    tmp_path: Path, content: str, complaint: str
) -> None:
    file = tmp_path / "token"
    file.write_text(content)
    with pytest.raises(ConfigError, match=complaint) as caught:
        Security.load(SecurityConfig(dir=str(tmp_path)), {})
    assert str(file) in str(caught.value)
    assert not content or content not in str(caught.value)


def test_folder_of_secrets_when_none_is_in_it_then_one_line_names_what_it_takes(
    tmp_path: Path,
) -> None:
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(
            ConfigError, match=r"security\.dir .*token, token-previous, redis-password, nats-token"
        ):
            Security.load(SecurityConfig(dir=str(folder)), {})


def test_token_file_when_a_program_is_given_one_then_it_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'.*absent': No such file"):
        Security.of_token_file(str(tmp_path / "absent"))


def test_tls_when_incomplete_then_the_missing_file_is_named(tmp_path: Path) -> None:
    for name in ("tls.crt", "ca.crt"):
        (tmp_path / name).write_text("-----BEGIN CERTIFICATE-----\n")
    with pytest.raises(ConfigError, match=r"tls\.key': No such file"):
        Security.load(SecurityConfig(tls_dir=str(tmp_path)), {})
    (tmp_path / "tls.key").write_text("no key")
    with pytest.raises(ConfigError, match=r"security\.tls_dir .*tls\.key is not a PEM file"):
        Security.load(SecurityConfig(tls_dir=str(tmp_path)), {})


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "[::1]", "localhost"])
def test_bind_when_loopback_then_needs_no_token(host: str) -> None:
    assert is_loopback(host)
    Security().check_bind(host, "--listen")


def test_bind_when_a_name_has_a_public_address_too_then_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = [(2, 1, 6, "", (address, 0)) for address in ("127.0.0.1", "192.0.2.7")]
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: found)
    assert not is_loopback("two-faced.example")
    found.pop()
    assert is_loopback("two-faced.example")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "[::]", "10.1.2.3", "no-such-host.invalid", ""])
def test_bind_when_others_reach_it_then_refused_without_a_token(host: str) -> None:
    with pytest.raises(ConfigError, match=r"--listen .*allow_insecure_bind=true"):
        Security().check_bind(host, "--listen")
    Security(token=TOKEN).check_bind(host, "--listen")
    Security(allow_insecure_bind=True).check_bind(host, "--listen")


def test_secrets_when_printed_then_hidden() -> None:
    from areal.security import Tls

    security = Security(TOKEN, "redis-secret", "nats-secret", Tls(b"c", b"private-key", b"a"))
    for secret in (TOKEN, "redis-secret", "nats-secret", "private-key"):
        assert secret not in repr(security)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("redis://:pass/wo#rd@host:1/0 is away", "redis://***@host:1/0 is away"),
        ("redis://u:p@ss@h:1/0", "redis://***@h:1/0"),
        ("nats://a:b@h1:1,nats://c@h2:2", "nats://***@h1:1,nats://***@h2:2"),
        ("hf://lab/model@main and s3://bucket/a@b", "hf://lab/model@main and s3://bucket/a@b"),
        ('{"url":"nats://user:pw@h:2","n":1}', '{"url":"nats://***@h:2","n":1}'),
        (f"'Authorization': 'Bearer {TOKEN}'", "'Authorization': 'Bearer ***'"),
        ("http://host/path mail a@b.c", "http://host/path mail a@b.c"),
        ("asks for a bearer token (token_file)", "asks for a bearer token (token_file)"),
    ],
)
def test_redaction_when_a_line_holds_a_secret_then_only_that_is_hidden(
    text: str, expected: str
) -> None:
    assert redact(text) == expected


def test_logs_when_a_secret_is_in_a_value_or_a_trace_then_hidden() -> None:
    stream = io.StringIO()
    root = logging.getLogger()
    before, root.handlers = root.handlers, []
    try:
        configure_logging("test", "run/one", stream=stream)
        get_logger("one").info("connecting", url="redis://:hunter2@h:1")
        try:
            raise OSError(f"refused Bearer {TOKEN}")
        except OSError as error:
            get_logger("two").error("failed", exc_info=error)
            logging.getLogger("library").warning("nats://u:hunter2@h", exc_info=True)
    finally:
        root.handlers = before
        structlog.reset_defaults()
        structlog.contextvars.clear_contextvars()
    said = stream.getvalue()
    assert said.count("***") == 4
    assert "hunter2" not in said
    assert TOKEN not in said


def test_config_error_when_an_override_holds_a_password_then_hidden() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'endpoints\.redis'") as caught:
        build_config(GRPOConfig, None, ["endpoints.rediss=redis://:hunter2@h:1/0"])
    assert "hunter2" not in str(caught.value)
    with pytest.raises(ConfigError, match="percent-encoded") as caught:
        connect_redis("redis://:hun/ter2@h:1/0")
    assert "hun" not in str(caught.value)
    assert "ter2" not in str(caught.value)


def test_environment_when_for_others_then_without_secrets() -> None:
    environment = {"PATH": "/bin", "AREAL_TOKEN": "t", "AREAL_NATS_TOKEN": "n", "AREAL_STACK": "s"}
    assert without_secrets(environment) == {"PATH": "/bin", "AREAL_STACK": "s"}


def test_previous_token_when_there_is_no_token_then_it_admits_no_one_alone() -> None:
    """A rotation needs both: by itself, the previous one would never be presented."""
    found = Security.load(SecurityConfig(), {"AREAL_TOKEN_PREVIOUS": TOKEN})
    assert found == Security()


@pytest.mark.parametrize("bad", ["short", "with spaces in it, and long"])
def test_previous_token_when_it_is_no_token_then_the_error_names_it(bad: str) -> None:
    variables = {"AREAL_TOKEN": TOKEN, "AREAL_TOKEN_PREVIOUS": bad}
    with pytest.raises(ConfigError, match="AREAL_TOKEN_PREVIOUS"):
        Security.load(SecurityConfig(), variables)


def test_previous_token_when_children_start_then_it_is_not_in_their_environment() -> None:
    assert without_secrets({"AREAL_TOKEN_PREVIOUS": TOKEN, "HOME": "/"}) == {"HOME": "/"}
