"""A run ends well wherever it is started: in another job, behind a proxy, in any locale, on IPv6.

Also where no one reads its output, and in a folder with an odd name.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.integration.stack_tools import RunningStack, areal_argv, environment
from tests.metric_names import read_metrics

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

_DEAD = "http://127.0.0.1:9"
_WORD = "é数\u2028😀"
_JOB = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "3",
    "LOCAL_WORLD_SIZE": "8",
    "GROUP_RANK": "1",
    "ROLE_RANK": "3",
    "MASTER_ADDR": "10.255.255.1",
    "MASTER_PORT": "23456",
    "PET_NNODES": "2",
    "PET_NODE_RANK": "1",
    "PET_RDZV_ENDPOINT": "10.255.255.1:29400",
    "TORCHELASTIC_RUN_ID": "x",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "8",
    "SLURM_JOB_ID": "77",
    "PMI_RANK": "3",
    "REDIS_PORT": "tcp://10.0.0.1:6379",
    "SGLANG_PORT": "tcp://10.0.0.1:30000",
}
_PROXIES = dict.fromkeys(
    [
        *("http_proxy", "https_proxy", "all_proxy", "grpc_proxy"),
        *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"),
    ],
    _DEAD,
)
_TWO_RANKS = "allocation_mode=sglang:d1+fsdp:d2"


def _nothing(folder: Path) -> dict[str, str]:
    return {}


def _locale(name: str, charmap: str) -> Callable[[Path], dict[str, str]]:
    """A locale that the machine need not have."""

    def make(folder: Path) -> dict[str, str]:
        program = shutil.which("localedef")
        made = program and subprocess.run(
            [program, "-i", name, "-f", charmap, str(folder / f"{name}.{charmap}")],
            capture_output=True,
            check=False,
        )
        if not made or made.returncode > 1:  # 1: with warnings
            pytest.skip(f"localedef cannot make the locale {name}.{charmap} on this machine")
        return {"LOCPATH": str(folder), "LC_ALL": f"{name}.{charmap}", "LANG": f"{name}.{charmap}"}

    return make


def _only_ipv6(argv: list[str]) -> list[str]:
    """The command in a network of its own, whose loopback has only IPv6."""
    setup = 'ip link set lo up && ip -4 addr flush dev lo && test -z "$(ip -4 -o addr)" '
    setup += "&& ip -6 -o addr show dev lo | grep -q ::1 && "
    for flags in ("-n", "-Urn"):
        start = ["unshare", flags, "sh", "-c"]
        try:
            tried = subprocess.run([*start, f"{setup}:"], capture_output=True, check=False)
        except OSError:
            break
        if tried.returncode == 0:
            return [*start, f'{setup}exec "$@"', "sh", *argv]
    pytest.skip("this machine permits no network namespace (unshare -n) with IPv6 alone")


def _unread(argv: list[str]) -> list[str]:
    """The command, whose output no one reads after its first line; its own exit code."""
    return ["bash", "-c", 'set -o pipefail; "$@" 2>&1 | head -n 1', "bash", *argv]


def _as_is(argv: list[str]) -> list[str]:
    return argv


@dataclass(frozen=True)
class Place:
    """Where a run is started."""

    variables: Mapping[str, str] = field(default_factory=dict)
    more: Callable[[Path], dict[str, str]] = _nothing
    """Variables that need a folder."""
    wrap: Callable[[list[str]], list[str]] = _as_is
    folder: str = "plain"
    overrides: tuple[str, ...] = ()


PLACES = {
    "another job": Place(_JOB),
    "another job, two ranks": Place(_JOB, overrides=(_TWO_RANKS,)),
    "proxies": Place(_PROXIES),
    "GBK": Place(more=_locale("zh_CN", "GBK"), folder="数 é"),
    "ISO-8859-1": Place(more=_locale("de_DE", "ISO-8859-1"), folder="数 é"),
    "only IPv6": Place(wrap=_only_ipv6),
    "only IPv6, two ranks": Place(wrap=_only_ipv6, overrides=(_TWO_RANKS,)),
    "odd path": Place(folder="""a b'c"d é数😀 100% $HOME;&#{x}[y] -z"""),
    "no reader": Place(wrap=_unread),
}


@pytest.mark.parametrize("name", PLACES)
def test_run_when_its_environment_is_hostile_then_it_trains_its_steps(
    name: str, tmp_path: Path
) -> None:
    place = PLACES[name]
    folder = tmp_path / place.folder
    folder.mkdir()
    for file in ("worded.py", "worded.yaml"):
        shutil.copy(Path(__file__).parent / "recipes" / file, folder)
    (folder / "word.txt").write_text(_WORD, "utf-8")
    row = {"messages": [{"role": "user", "content": f"say {_WORD}"}], "word": _WORD}
    line = json.dumps(row, ensure_ascii=False) + "\n"
    (folder / "rows.jsonl").write_text(line * 4, "utf-8")
    stack = RunningStack(folder / "runs" / "worded" / "t0")
    argv = areal_argv("run", "worded.py", "trial_name=t0", *place.overrides)
    (tmp_path / "locales").mkdir()
    variables = {**environment(), **place.variables, **place.more(tmp_path / "locales")}
    try:
        done = subprocess.run(
            place.wrap(argv),
            cwd=folder,
            env=variables,
            capture_output=True,
            timeout=400,
            check=False,
        )
        said = (done.stdout + done.stderr).decode("utf-8", "replace")
        assert done.returncode == 0, said + stack.log("launcher") + stack.log("trainer")
        stack.assert_gone()
    finally:
        stack.clean_up()
    assert [row["step"] for row in read_metrics(stack.run_dir)] == [1, 2]
    summary = json.loads((stack.run_dir / "summary.json").read_text("utf-8"))
    assert (summary["status"], summary["restarts"]) == ("finished", {})
    books = summary["accounting"]
    assert (books["trained"], books["dead_lettered"]) == (8, 0)
    assert os.fsdecode(b"training on \xc3\xa9\xe6\x95\xb0") in stack.log("trainer")
