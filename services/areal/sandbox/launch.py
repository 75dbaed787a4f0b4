"""The command lines of a box's process, and what is missing where it cannot start."""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from areal.errors import CannotStart
from areal.sandbox.syscalls import seccomp_program

NOBODY = 65534
FOLDER = "/tmp"  # noqa: S108  (of the box)
_SYSTEM = ("/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/alternatives")
# What bubblewrap makes belongs to the service's user; only mounts below it take files after this.
_READ_ONLY = ("--remount-ro", "/", "--remount-ro", "/dev")
NAMESPACES = (
    "expected a machine that lets unprivileged users create namespaces "
    "(sysctl kernel.unprivileged_userns_clone=1, user.max_user_namespaces > 0, "
    "kernel.apparmor_restrict_unprivileged_userns=0), or a container that may (docs/isolation.md)"
)
_ZYGOTE = Path(__file__).with_name("zygote.py")
_LANDLOCK_CREATE_RULESET, _VERSION = 444, 1


def bubblewrap(packages: Path | None) -> list[str]:
    """Returns the command of a box; raises CannotStart if bubblewrap is missing."""
    base = Path(sys.base_prefix).resolve()
    inside = base if base.is_relative_to("/usr") else Path("/python")
    command = [program(), "--die-with-parent", "--new-session", "--clearenv"]
    command += [f"--unshare-{each}" for each in ("ipc", "pid", "net", "uts", "cgroup-try")]
    if os.getuid() == 0:
        # Root would stay root in a user namespace, and /proc/sys would obey it. It needs none to
        # make the others; the zygote mounts /proc and becomes nobody.
        for capability in ("SYS_ADMIN", "SETUID", "SETGID"):
            command += ["--cap-add", f"CAP_{capability}"]
        command += ["--dir", "/proc"]
    else:
        command += ["--unshare-user", "--uid", str(NOBODY), "--gid", str(NOBODY)]
        command += ["--proc", "/proc"]
    command += ["--hostname", "box", "--perms", "0755", "--dir", "/etc"]
    command += ["--perms", "0755", "--dir", "/home", "--symlink", FOLDER, "/home/user"]
    command += system()
    if inside != base:
        command += ["--ro-bind", str(base), str(inside)]
    if packages is not None:
        command += ["--ro-bind", str(packages), "/packages"]
    for file in (_ZYGOTE, _ZYGOTE.with_name("session.py")):
        command += ["--ro-bind", str(file), f"/{file.name}"]
    command += ["--dev", "/dev", "--tmpfs", FOLDER, *_READ_ONLY, "--chdir", FOLDER]
    path = f"{inside}/bin:/usr/local/bin:/usr/bin:/bin"
    for name, value in variables(FOLDER, path, f"{inside}/lib").items():
        command += ["--setenv", name, value]
    python = inside / "bin" / f"python3.{sys.version_info.minor}"
    return [*command, str(python), "-I", "-B", f"/{_ZYGOTE.name}"]


def plain(folder: str) -> tuple[list[str], dict[str, str]]:
    """Returns the command and the environment of a box without namespaces, in a folder.

    Raises:
        CannotStart: This process is root, so that programs run as nobody, who may not read this
            interpreter.
    """
    base = Path(sys.base_prefix).resolve()
    python = base / "bin" / f"python3.{sys.version_info.minor}"
    readable = all(path.stat().st_mode & 0o005 == 0o005 for path in (python, *python.parents))
    if os.getuid() == 0 and not readable:
        base, python = Path("/usr"), Path("/usr/bin/python3")
        if not python.exists():
            raise CannotStart(
                f"sandbox: isolation rlimits as root: expected an interpreter that user nobody may "
                f"read, not {sys.base_prefix}; run as another user"
            )
    path = f"{base}/bin:/usr/local/bin:/usr/bin:/bin"
    shown = [str(base), "/usr", *_SYSTEM] if hides_files() else []
    command = [str(python), "-I", "-B", str(_ZYGOTE), folder, *shown]
    return command, variables(folder, path, f"{base}/lib") | {"TMPDIR": folder}


def hides_files() -> bool:
    """Whether a box without namespaces keeps files from programs: the kernel has Landlock."""
    libc = ctypes.CDLL(None)
    return int(libc.syscall(_LANDLOCK_CREATE_RULESET, None, 0, _VERSION)) > 0


def confine(argv: Sequence[str], folders: Sequence[str], disk_mb: int) -> tuple[list[str], int]:
    """Returns a command that runs a process of ours in a box, and a descriptor it must inherit.

    It sees /usr and `folders`, read-only and in their places; it keeps its standard streams and the
    descriptors that it inherits, and has no network. Its environment is the caller's to choose.

    Args:
        argv: The process.
        folders: Of its interpreter and packages.
        disk_mb: Of /tmp, and of /dev/shm, in memory.

    Raises:
        CannotStart: bubblewrap is missing.
    """
    command = [program(), "--die-with-parent"]
    command += [f"--unshare-{each}" for each in ("user", "ipc", "pid", "net", "uts", "cgroup-try")]
    command += ["--uid", str(NOBODY), "--gid", str(NOBODY), "--hostname", "box"]
    command += [*system(), "--proc", "/proc", "--dev", "/dev"]
    for name in ("sys", "sysrq-trigger", "irq", "bus"):  # root's, if this process is
        if Path("/proc", name).exists():
            command += ["--ro-bind", f"/proc/{name}", f"/proc/{name}"]
    for folder in (FOLDER, "/dev/shm"):  # noqa: S108  (of the box)
        command += ["--size", str(disk_mb << 20), "--tmpfs", folder]
    for folder in folders:
        if Path(folder).is_dir() and not Path(folder).is_relative_to("/usr"):
            command += ["--ro-bind", folder, folder]
    rules = os.memfd_create("seccomp", 0)
    os.write(rules, seccomp_program())
    os.lseek(rules, 0, os.SEEK_SET)
    return [*command, *_READ_ONLY, "--chdir", FOLDER, "--seccomp", str(rules), "--", *argv], rules


def program() -> str:
    """Returns bubblewrap's path; raises CannotStart if it is missing."""
    found = shutil.which("bwrap")
    if not found:
        raise CannotStart("sandbox: no `bwrap`; install bubblewrap (apt-get install bubblewrap)")
    return found


def system() -> list[str]:
    """Returns the arguments that show /usr and what belongs to it, read-only."""
    command = ["--ro-bind", "/usr", "/usr"]
    for path in map(Path, _SYSTEM):
        if path.is_symlink():
            command += ["--symlink", str(path.readlink()), str(path)]
        elif path.exists():
            command += ["--ro-bind", str(path), str(path)]
    return command


def variables(home: str, path: str, libraries: str) -> dict[str, str]:
    """Returns the environment of a box."""
    return {
        "PATH": path,
        "LD_LIBRARY_PATH": libraries,
        "HOME": home,
        "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": "1",
    }


def advice(said: str) -> str:
    """Returns what bubblewrap said, and what this machine would have to allow."""
    said = said.strip()[-500:]
    if "namespace" in said or "Operation not permitted" in said or "uid map" in said:
        return f"{said}; {NAMESPACES}"
    return said
