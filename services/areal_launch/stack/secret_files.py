"""Secrets of a stack on this machine: files that only their owner reads.

Children find them by the experiment file, which names files; so nothing secret is in an argument
list, in config.yaml or in a child's environment. What the launcher makes lies in `secrets/` of the
run folder and goes when the stack ends.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import yaml

from areal.chassis.files import foreign_owner, replacing
from areal.config.experiment import BaseExperimentConfig
from areal.errors import ConfigError
from areal.security import Security
from areal_launch.run_folder import RunFolder

_CONFIG = "--config"


def place_secrets(
    config: BaseExperimentConfig, folder: RunFolder, *, make_token: bool = True
) -> Security:
    """Makes `config.security` name folders with every secret there is.

    Secrets of the environment, and those of a folder of the user's, are written to one of the run.
    A stack that was given no token gets one: every user of a machine reaches its loopback
    addresses. Where there is a token, stores that the stack will start get a fresh password each.

    Args:
        config: Its `security` is changed.
        folder: The run folder; new secrets are written to its `secrets/`.
        make_token: False: only what is given; the job that starts the stack makes the rest.

    Raises:
        ConfigError: A file cannot be read, or does not hold a valid token.
    """
    given, section = Security.load(config.security), config.security
    token = given.token or (secrets.token_urlsafe(32) if make_token else "")

    def for_store(password: str, endpoint: str) -> str:
        return password or (secrets.token_urlsafe(32) if token and not endpoint else "")

    made = {
        "token": token,
        "token-previous": given.previous_token,
        "redis-password": for_store(given.redis_password, config.endpoints.redis),
        "nats-token": for_store(given.nats_token, config.endpoints.nats),
    }
    for name, value in made.items():
        if value:
            section.dir = str(write_secret(folder, name, value).parent.resolve())
    if section.tls_dir:
        section.tls_dir = str(Path(section.tls_dir).resolve())
    return Security.load(section)


def write_secret(folder: RunFolder, name: str, text: str) -> Path:
    """Writes a file that was never readable for others, not even for a moment.

    Raises:
        ConfigError: The folder of secrets is another user's.
    """
    folder.secrets.mkdir(mode=0o700, parents=True, exist_ok=True)
    if why := foreign_owner(folder.secrets):
        raise ConfigError(f"{why}; choose another run folder with run_root=DIR")
    file = folder.secrets / name
    with replacing(file, 0o600) as fresh:
        fresh.write_text(text + "\n", "utf-8")
    return file


def sglang_config(
    config: BaseExperimentConfig, folder: RunFolder, command: list[str]
) -> tuple[list[str], str]:
    """Writes a file for SGLang's `--config` that holds the token as its `--api-key`.

    At the level `info` SGLang logs all its arguments, the key among them; hence `log-level`.

    Args:
        config: Names the token's file.
        folder: The run folder.
        command: The user's, which may name a file of its own; what that says is kept.

    Returns:
        The command without its own `--config`, and our file.

    Raises:
        ConfigError: The command's own file cannot be read, or is no mapping.
    """
    content: dict[str, Any] = {}
    parts = [
        piece
        for part in command
        for piece in (part.split("=", 1) if part.startswith(f"{_CONFIG}=") else [part])
    ]
    if _CONFIG in parts[:-1]:
        at = parts.index(_CONFIG)
        content, command = _mapping(parts[at + 1]), parts[:at] + parts[at + 2 :]
    content |= {"api-key": Security.load(config.security).token, "log-level": "warning"}
    return command, str(write_secret(folder, "sglang.yaml", yaml.safe_dump(content)))


def _mapping(file: str) -> dict[str, Any]:
    key = f"stack.inference_command: --config {file!r}"
    try:
        content = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{key}: {str(error).splitlines()[0]}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{key}: expected a mapping of SGLang's flags")
    # SGLang takes both spellings, so one of them would win by chance.
    return {str(name).replace("_", "-"): value for name, value in content.items()}
