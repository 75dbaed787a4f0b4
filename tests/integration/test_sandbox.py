"""What code in a box can do: nothing to the machine, within its limits, and gone when it ends."""

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from areal.errors import InvalidInput
from areal.rewards.code import code_reward, final_code
from areal.sandbox import Limits, Sandbox
from areal.sandbox.box import Box


def boxes_work() -> str:
    """Why there is no box on this machine; empty: there is."""
    if not shutil.which("bwrap"):
        return "no bubblewrap (apt-get install bubblewrap)"
    command = ["bwrap", "--unshare-user", "--unshare-pid", "--ro-bind", "/", "/", "true"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    return ran.stderr.strip()


REASON = boxes_work()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON or "boxes work")
SHORT = Limits(seconds=4, memory_mb=128, processes=16, output_kb=64, disk_mb=8)


@pytest.fixture
async def sandbox():
    made = Sandbox(slots=2)
    yield made
    await made.close()


async def test_a_program_has_its_files_and_its_input(sandbox):
    outcome = await sandbox.run(
        "import sys, helper; print(helper.double(int(sys.stdin.read()))); sys.exit(3)",
        files={"helper.py": "def double(x): return 2 * x"},
        stdin="21",
    )
    assert (outcome.stdout, outcome.exit_code, outcome.cause) == ("42\n", 3, "")
    outcome = await sandbox.run(
        argv=["sh", "-c", "cat a/b; echo no >&2; exit 4"], files={"a/b": "x"}
    )
    assert (outcome.stdout, outcome.stderr, outcome.exit_code) == ("x", "no\n", 4)
    outcome = await sandbox.run("1 / 0")
    assert outcome.exit_code == 1
    assert "ZeroDivisionError" in outcome.stderr


async def test_what_is_asked_wrongly_is_refused(sandbox):
    with pytest.raises(InvalidInput, match=r"'\.\./x': expected a path inside"):
        await sandbox.run("1", files={"../x": ""})
    with pytest.raises(InvalidInput, match="No such file"):
        await sandbox.run(argv=["no-such-program"])
    assert (await sandbox.run("print(1)")).stdout == "1\n"


BOMBS = {
    "a loop": ("while True: pass", "time"),
    "sleep": ("import time; time.sleep(60)", "time"),
    "one that ignores signals": (
        "import signal\nfor s in range(1, 65):\n try: signal.signal(s, signal.SIG_IGN)\n"
        " except OSError: pass\nwhile True: pass",
        "time",
    ),
    "a fork bomb": ("import os\nwhile True:\n try: os.fork()\n except OSError: pass", "time"),
    "memory": ("x = []\nwhile True: x.append(bytearray(1 << 20))", "memory"),
    "memory of many": (
        "import os, time\nfor _ in range(3): os.fork()\nx = b'1' * (40 << 20)\ntime.sleep(60)",
        "memory",
    ),
    "output": ("while True: print('x' * 1000)", "output"),
    "memory that processes share": (
        "import mmap, os, time\nm = mmap.mmap(-1, 256 << 20)\nif os.fork():\n"
        " for at in range(0, len(m), 4096): m[at] = 1\ntime.sleep(60)",
        "memory",
    ),
    "shared memory of many": (
        "import mmap, os, time\nfor _ in range(3): os.fork()\nm = mmap.mmap(-1, 40 << 20)\n"
        "for at in range(0, len(m), 4096): m[at] = 1\ntime.sleep(60)",
        "memory",
    ),
}


@pytest.mark.parametrize("name", BOMBS)
async def test_a_bomb_ends_at_its_limit_and_the_next_program_runs(sandbox, name):
    code, cause = BOMBS[name]
    # Each process counts what it shares with its parent, too: room for the bomb's.
    limits = replace(SHORT, memory_mb=512) if name == "a fork bomb" else SHORT
    outcome = await sandbox.run(code, limits=limits)
    assert (outcome.cause, outcome.exit_code) == (cause, 137), outcome
    assert len(outcome.stdout) <= SHORT.output_kb << 10
    after = await sandbox.run("import os; print([p for p in os.listdir('/proc') if p.isdigit()])")
    assert after.stdout == "['1', '2']\n"


ESCAPES = {
    "disk": "open('big', 'wb').write(bytes(9 << 20))",
    "shared memory": "open('/dev/shm/big', 'wb').write(bytes(9 << 20))",
    "network": "import socket; socket.create_connection(('1.1.1.1', 53), 2)",
    "the machine's files": "open('/etc/passwd').read()",
    "its home": f"open({str(Path.home())!r} + '/x', 'w')",
    "this repository": f"import os; os.listdir({str(Path(__file__).parent)!r})",
    "system folders": "open('/usr/x', 'w')",
    "the interpreter": "import os; open(os.__file__, 'a')",
    "symlinks": "import os; os.symlink('/proc/1/root/etc', 'l'); os.listdir('l')",
    "settings of the kernel": "open('/proc/sys/kernel/hostname', 'w').write('x')",
    "memory of pid 1": "open('/proc/1/mem', 'r+b')",
    "environment of pid 1": "open('/proc/1/environ').read()",
    "files of pid 1": "import os; os.listdir('/proc/1/fd')",
    "devices": "import os; os.mknod('disk', 0o60600, os.makedev(8, 0))",
    "another user": "import os; os.setuid(0)",
    "memory without a name": "import os; os.memfd_create('x')",
    "the kernel's own sockets": "import socket; socket.socket(16, socket.SOCK_RAW)",
    "the limits of pid 1": "import resource as r; r.prlimit(1, r.RLIMIT_NOFILE, (1, 1))",
    "shared memory of System V": (
        "import ctypes; l = ctypes.CDLL(None)\n"
        "if l.shmget(0, 1 << 20, 0o1600) == l.msgget(0, 0o1600) == -1: raise OSError('refused')"
    ),
}


@pytest.mark.parametrize("name", ESCAPES)
async def test_there_is_nothing_to_reach(sandbox, name):
    outcome = await sandbox.run(ESCAPES[name], limits=SHORT)
    assert outcome.exit_code == 1, outcome
    assert "Error" in outcome.stderr


async def test_the_kernel_refuses_what_the_filter_names(sandbox):
    code = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def refused(call, *arguments):
    return getattr(libc, call)(*arguments) == -1 and ctypes.get_errno()
print(refused('unshare', 0x10000000), refused('ptrace', 16, 1, 0, 0),
      refused('mount', b'none', b'/tmp', b'tmpfs', 0, None), refused('setns', 0, 0))
status = open('/proc/self/status').read()
named = ('CapEff', 'CapBnd', 'NoNewP')
print([line.split()[1] for line in status.splitlines() if line[:6] in named])
print([fd for fd in os.listdir('/proc/self/fd')])
print(sorted(os.environ), os.getuid())
"""
    outcome = await sandbox.run(code)
    none = "0" * 16
    assert outcome.stdout.splitlines() == [
        "1 1 1 1",
        f"['{none}', '{none}', '1']",
        "['0', '1', '2', '3']",
        "['HOME', 'LANG', 'LD_LIBRARY_PATH', 'OMP_NUM_THREADS', 'PATH', 'PWD'] 65534",
    ], outcome


async def test_signals_reach_no_process_outside(sandbox):
    outcome = await sandbox.run(
        "import os\nfor pid in (1, os.getppid(), -1):\n try: os.kill(pid, 9)\n"
        " except OSError: pass\nprint('alone')"
    )
    assert outcome.stdout == "alone\n"


async def test_what_a_program_leaves_ends_with_it(sandbox):
    outcome = await sandbox.run(
        argv=["sh", "-c", "setsid sleep 4242 > /dev/null 2>&1 & sleep 0.2; touch /tmp/x"]
    )
    assert outcome.exit_code == 0
    assert ["sleep", "4242"] not in [
        each.info["cmdline"] for each in psutil.process_iter(["cmdline"])
    ]
    assert (await sandbox.run("import os; print(os.listdir('/tmp'))")).stdout == "[]\n"


async def test_one_who_gives_up_ends_the_program_and_frees_the_slot():
    sandbox = Sandbox(slots=1)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1.0):
            await sandbox.run("while True: pass", limits=Limits(seconds=600))
    assert (await sandbox.run("print(1)")).stdout == "1\n"
    await sandbox.close()


async def test_a_box_that_was_killed_is_replaced():
    sandbox = Sandbox(slots=1)
    await sandbox.run("1")
    (box,) = sandbox._idle
    box._process.kill()
    await box._process.wait()
    assert (await sandbox.run("print(1)")).stdout == "1\n"
    running = asyncio.create_task(sandbox.run("while True: pass", limits=Limits(seconds=600)))
    while not (box._process and (await asyncio.sleep(0.1)) is None and not sandbox._idle):
        pass
    box._process.kill()
    assert (await running).cause == "memory"  # as when the kernel takes it
    assert (await sandbox.run("print(1)")).stdout == "1\n"
    await sandbox.close()


WRITABLE = """
import os
places = {line.split()[4] for line in open('/proc/self/mountinfo')}
for place in list(places):
    if place != '/proc' and os.path.isdir(place):
        places |= {os.path.join(place, name) for name in os.listdir(place)}
for place in sorted(places):
    for name in ('left', 'sitecustomize.py'):
        try:
            open(os.path.join(place, name), 'a').write('x')
            print(place)
        except OSError:
            pass
"""
OTHER_USER = 4242
OTHER_PYTHON = "/usr/bin/python3" if os.getuid() == 0 else sys.executable


def as_other_user(code: str) -> subprocess.CompletedProcess[str]:
    """Runs code as an ordinary user, as services in containers do, if this one is root."""
    packages = [path for path in sys.path if path.endswith("site-packages")]
    services = str(Path(__file__).parents[2] / "services")
    user = {"user": OTHER_USER, "group": OTHER_USER, "extra_groups": []} if not os.getuid() else {}
    return subprocess.run(
        [OTHER_PYTHON, "-B", "-c", code],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": ":".join([services, *packages])},
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
        **user,
    )


def test_box_when_its_service_is_not_root_then_programs_write_only_to_folders_that_end_with_them():
    if "ok" not in as_other_user("import areal.sandbox; print('ok')").stdout:
        pytest.skip(f"user {OTHER_USER} may not read this checkout and its packages")
    ran = as_other_user(
        "import asyncio\nfrom areal.sandbox import Sandbox\n"
        f"code = {WRITABLE!r}\n"
        "async def main():\n s = Sandbox(slots=1)\n"
        " print((await s.run(code)).stdout, '--', (await s.run(code.replace(\"'a'\", \"'r'\")))"
        ".stdout)\n await s.close()\n"
        "asyncio.run(main())"
    )
    wrote, _, found = ran.stdout.partition("--")
    assert set(wrote.split()) == {"/tmp", "/dev/shm"}, ran
    assert found.split() == []


async def test_box_when_its_service_is_this_user_then_programs_write_to_the_same_folders(sandbox):
    assert set((await sandbox.run(WRITABLE)).stdout.split()) == {"/tmp", "/dev/shm"}


async def test_box_when_input_comes_after_its_program_has_ended_then_the_next_program_runs():
    box = Box()
    await box.start()
    for _ in range(2):
        await box.open(SHORT)
        command = await box.run(argv=["true"], last=True)
        await box.closed()
        assert command.ended.exit_code == 0
        await command.write(b"late", eof=True)
    await box.close()


async def test_packages_are_there_if_named(tmp_path):
    tmp_path.chmod(0o755)
    (tmp_path / "our_package.py").write_text("NAME = 'here'")
    without, having = Sandbox(slots=1), Sandbox(slots=1, packages=tmp_path)
    assert (await without.run("import our_package")).exit_code == 1
    assert (await having.run("import our_package as p; print(p.NAME)")).stdout == "here\n"
    await without.close()
    await having.close()


def test_a_box_ends_with_the_process_that_made_it():
    code = (
        "import asyncio, os\nfrom areal.sandbox import Sandbox\n"
        "async def main():\n s = Sandbox(slots=1)\n await s.run('1')\n"
        " print(s._idle[0]._process.pid, flush=True)\n os.kill(os.getpid(), 9)\n"
        "asyncio.run(main())"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(int(ran.stdout)).wait(timeout=30)  # raises if the box outlived its maker


@pytest.mark.parametrize(
    ("code", "score"),
    [
        ("def double(x): return 2 * x", 1.0),
        (
            "no:\n```python\ndef double(x): return x\n```\n"
            "better:\n```python\ndef double(x):\n    return x + x\n```",
            1.0,
        ),
        ("def double(x): return x", 0.0),
        ("def double(x): return 2 * x\nimport os; os._exit(0)", 0.0),
        ("import sys; sys.exit(0)", 0.0),
        ("def double(x):", 0.0),
        ("while True: pass", 0.0),
        ("print('\\n' + '0' * 32)\nraise SystemExit", 0.0),
    ],
)
async def test_code_is_judged_by_its_tests(sandbox, code, score):
    assert await code_reward(sandbox, code, "assert double(3) == 6", limits=SHORT) == score


def test_the_last_block_is_the_code():
    assert final_code("a\n```\nx = 1\n```\n```py\nx = 2\n```") == "x = 2\n"
    assert final_code("x = 3") == "x = 3"
