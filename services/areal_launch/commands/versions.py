"""`areal versions`: which versions a run has published, and which servers serve them."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from areal.chassis.files import new_folder
from areal.clients.weight_sync import WeightSyncClient
from areal.config.experiment import BaseExperimentConfig, load_service_config
from areal.config.transports import in_object_store
from areal.errors import ArealError, InvalidInput, NotFound
from areal.runs.checkpoints import Checkpoint, CheckpointFolder, removed, verify
from areal.runs.run_files import EVALUATIONS, best_step, describe_best
from areal.security import Security, SecurityConfig
from areal.weights.manifest import PolicyVersion, build_manifest, stored_versions
from areal.weights.objects import ObjectStore
from areal.weights.servers import ServerState
from areal_launch.processes.process import python_environment
from areal_launch.run_folder import RunFolder, find_run
from areal_launch.view.output import print_json, print_table, say

_STEP = re.compile("[0-9]{1,18}")
_TRIES = 5
"""Exports of `best` and `latest` before a run that removes each checkpoint meanwhile is named."""


def list_versions(run: Path | None, *, endpoint: str = "", as_json: bool) -> int:
    """Prints every version that is kept, oldest first."""
    versions, serving, problem = _look(run, endpoint)
    if as_json:
        rows = [_as_json(version, serving[version.version]) for version in versions]
        print_json([{k: v for k, v in row.items() if k != "tensors"} for row in rows])
        return 0
    now = time.time()
    print_table(
        ("version", "age", "MiB", "encoding", "digest", "served by"),
        [
            (
                version.folder_name,
                f"{now - version.publish_time:.0f} s",
                f"{version.size_bytes / 2**20:.1f}",
                encoding(version),
                version.digest[:12],
                ", ".join(serving[version.version]) or "-",
            )
            for version in versions
        ],
    )
    if problem:
        say(f"the servers of these versions are unknown: {problem}")
    return 0


def show_version(run: Path | None, version: int, *, endpoint: str = "") -> int:
    """Prints one version's manifest as JSON, with the servers that serve it.

    Raises:
        NotFound: The version is not kept.
    """
    versions, serving, _ = _look(run, endpoint)
    found = [each for each in versions if each.version == version]
    if not found:
        kept = ", ".join(str(each.version) for each in versions)
        raise NotFound(f"version {version}: not stored; stored: {kept}")
    # If several incarnations published this version, the last one counts.
    print_json(_as_json(found[-1], serving[version]))
    return 0


def export_version(run: Path | None, which: str, to: Path) -> int:
    """Writes a checkpoint as a Hugging Face folder; returns the exit code.

    Raises:
        NotFound: There is no such checkpoint, the run removed it meanwhile, or no kept checkpoint
            was evaluated.
        InvalidInput: `which` has another form, the checkpoint is damaged, or the folder already
            exists.
    """
    run_folder = find_run(run, live=False)
    if to.exists():
        raise InvalidInput(f"--to {str(to)!r}: already exists, expected a new folder")
    for _ in range(_TRIES):
        chosen = find_checkpoint(run_folder.path, which)
        why_best = f", {_why_best(run_folder.path)}" if which == "best" else ""
        code = _export(run_folder, chosen, to)
        if code == 0:
            say(f"step {chosen.step} of {run_folder.path}{why_best}: {to}")
        if code is not None:
            return code
        if which.isdigit():  # else a newer one has taken its place
            break
    kept = ", ".join(str(each.step) for each in _checkpoints(run_folder.path)) or "none"
    raise NotFound(
        f"{which}: the run has removed this checkpoint meanwhile; kept: {kept}; expected one that "
        "stays, with a higher checkpoint.keep, or a run that is over"
    )


def find_checkpoint(run: Path, which: str) -> Checkpoint:
    """Returns the checkpoint that `which` names: best, latest, or a step.

    Raises:
        NotFound: There is no such checkpoint, or no kept checkpoint was evaluated.
        InvalidInput: `which` has another form.
    """
    checkpoints = {each.step: each for each in _checkpoints(run)}
    step: int | None
    if which == "latest":
        step = max(checkpoints, default=None)
    elif which == "best":
        step = best_step(_evaluations(run), list(checkpoints))
    elif _STEP.fullmatch(which):
        step = int(which)
    else:
        raise InvalidInput(f"{which!r:.80}: expected best, latest, or the step of a checkpoint")
    if step is None or step not in checkpoints:
        kept = ", ".join(map(str, sorted(checkpoints))) or "none"
        why = "no kept checkpoint was evaluated" if which == "best" else "no such checkpoint"
        raise NotFound(f"{which}: {why}; kept: {kept}")
    return checkpoints[step]


def _export(run: RunFolder, checkpoint: Checkpoint, to: Path) -> int | None:
    """Returns the exit code of the export; None if the run removed the checkpoint meanwhile."""
    command = [sys.executable, "-m", "areal_torch.engines.export_checkpoint"]
    try:
        verify(checkpoint.path)
        with new_folder(to) as half:
            arguments = [run.config_file, checkpoint.path, half, run.started_in()]
            subprocess.run(  # noqa: S603
                [*command, *map(str, arguments)],
                check=True,
                stdout=sys.stderr,
                env=python_environment(),
            )
    except NotFound:
        return None
    except subprocess.CalledProcessError as error:
        return None if removed(checkpoint.path) else error.returncode
    except OSError as error:
        raise InvalidInput(f"--to {str(to)!r}: {error.strerror or error}") from None
    return 0


def _evaluations(run: Path) -> list[dict[str, Any]]:
    results = run / "trainer.json"
    measured = json.loads(results.read_text("utf-8")) if results.is_file() else {}
    return list(measured.get(EVALUATIONS, []))


def _why_best(run: Path) -> str:
    return describe_best(_evaluations(run), [each.step for each in _checkpoints(run)])


def _checkpoints(run: Path) -> list[Checkpoint]:
    return CheckpointFolder(run / "checkpoints", keep=1).list()


def encoding(version: PolicyVersion) -> str:
    """Returns "full", or the base version and the size of a delta."""
    if version.delta is None:
        return "full"
    return f"delta of {version.delta.base}, {version.delta.size_bytes / 2**20:.2f} MiB"


def kept_versions(config: BaseExperimentConfig, start: Path) -> list[PolicyVersion]:
    """Returns the configured model, then the versions in the weights folder, oldest first.

    Relative paths begin at `start`.
    """
    place = config.weight_sync.path
    remote = in_object_store(place)
    root = (start / (place if place and not remote else config.run_dir / "weights")).resolve()
    model = (start / config.model.path).resolve()
    first = [_start_version(model)] if (model / "config.json").is_file() else []
    uploaded = ObjectStore(place).versions() if remote else []
    return [*first, *stored_versions(root), *uploaded]


def _start_version(model: Path) -> PolicyVersion:
    """Returns version 0; it has no manifest that says when it was made, but its files do."""
    found = build_manifest(model, 0, 0)
    written = max((model / file.name).stat().st_mtime for file in found.files)
    return replace(found, publish_time=written)


def _look(run: Path | None, endpoint: str) -> tuple[list[PolicyVersion], dict[int, list[str]], str]:
    """Returns kept versions, the servers of each, and why these are unknown (or "")."""
    serving: dict[int, list[str]] = defaultdict(list)
    if endpoint:  # a stack on other machines: weight-sync returns both
        return *asyncio.run(_ask(endpoint, Security.load(SecurityConfig()))), ""
    folder = find_run(run, live=False)
    config, start = load_service_config(folder.config_file), folder.started_in()
    versions = kept_versions(config, start)
    if not folder.held():
        return versions, serving, f"{folder.path}: not running"
    try:
        _, serving = asyncio.run(_ask(config.endpoints.weight_sync, Security.load(config.security)))
    except ArealError as error:
        return versions, serving, str(error)
    return versions, serving, ""


async def _ask(
    address: str, security: Security
) -> tuple[list[PolicyVersion], dict[int, list[str]]]:
    client = WeightSyncClient(address, security)
    serving: dict[int, list[str]] = defaultdict(list)
    try:
        versions = await client.list_versions()
        servers, _ = await client.list_servers()
    finally:
        await client.close()
    for server in servers:
        if server.state is ServerState.SERVING:
            serving[server.version].append(server.server_id)
    return versions, serving


def _as_json(version: PolicyVersion, servers: list[str]) -> dict[str, Any]:
    name = version.folder_name
    return {
        "name": name,
        **asdict(version),
        "digest": version.digest,
        "size_bytes": version.size_bytes,
        "encoding": "full" if version.delta is None else "delta",
        "served_by": servers,
    }
