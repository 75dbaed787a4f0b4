"""A real Slurm cluster of two nodes on this machine, in a folder of its own."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue")
NODES = ("n1", "n2")
READY_S = 60.0

_CONFIG = """
ClusterName=areal
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
KillWait=30
SlurmdParameters=config_overrides
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 RealMemory=4000
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 RealMemory=4000
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing_programs() -> str:
    """Why there can be no cluster here; "" when there can."""
    if sys.platform != "linux":
        return f"Slurm needs Linux, this is {sys.platform}"
    absent = [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]
    return f"not on PATH: {', '.join(absent)} (Debian: slurm-wlm, munge)" if absent else ""


@contextlib.contextmanager
def slurm_cluster(folder: Path) -> Iterator[dict[str, str]]:
    """Starts the daemons, yields the environment that reaches them, ends them."""
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    folder.chmod(0o755)  # munged insists
    for name in ("state", *(f"spool-{node}" for node in NODES)):
        (folder / name).mkdir(exist_ok=True)
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(128))
    config = folder / "slurm.conf"
    host = socket.gethostname().partition(".")[0]
    config.write_text(
        _CONFIG.format(folder=folder, host=host, user=getpass.getuser(), ports=_ports(3))
    )
    # Asked for even where nothing uses control groups; releases from 23.11 on can do without.
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    environment = {"SLURM_CONF": str(config), "PATH": _path()}
    files = {option: f"{folder}/munge.{option}" for option in ("socket", "pid", "log", "seed")}
    munge = [
        *("munged", "--foreground", "--force", f"--key-file={key}", f"--socket={files['socket']}"),
        *(f"--pid-file={files['pid']}", f"--log-file={files['log']}"),
        f"--seed-file={files['seed']}",
    ]
    commands = [munge, ["slurmctld", "-D", "-i"], *(["slurmd", "-D", "-N", n] for n in NODES)]
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        for number, command in enumerate(commands):
            output = (folder / f"daemon-{number}.out").open("wb")
            daemons.append(
                subprocess.Popen(
                    command,
                    env={**os.environ, **environment},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                )
            )
            output.close()
            if number == 0:
                _wait(lambda: Path(files["socket"]).exists(), "munged", folder)
        _wait(lambda: _idle(environment) == len(NODES), "nodes to be idle", folder)
        yield environment
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in reversed(daemons):
            try:
                daemon.wait(20.0)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def jobs(environment: dict[str, str]) -> list[str]:
    """Numbers of the jobs that are queued, run or are being ended."""
    listed = _ask(environment, "squeue", "--noheader", "--format=%i")
    return listed.split()


def _idle(environment: dict[str, str]) -> int:
    try:
        return (
            _ask(environment, "sinfo", "--noheader", "--Node", "--format=%T").split().count("idle")
        )
    except subprocess.CalledProcessError:
        return 0  # the controller is starting


def _ask(environment: dict[str, str], *command: str) -> str:
    return subprocess.run(
        command,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=30.0,
    ).stdout


def _wait(condition: object, what: str, folder: Path) -> None:
    assert callable(condition)
    deadline = time.monotonic() + READY_S
    while not condition():
        said = "".join(file.read_text(errors="replace")[-500:] for file in folder.glob("*.out"))
        assert time.monotonic() < deadline, f"waited {READY_S:.0f} s for {what}: {said}"
        time.sleep(0.2)


def _path() -> str:
    """Debian puts the daemons where a user's PATH does not look."""
    return os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


def _ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()
