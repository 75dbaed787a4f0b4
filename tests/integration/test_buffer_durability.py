"""What an acknowledgement is worth: on disk first, as the system calls of the server show."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis.asyncio as redis
from tests.buffer_client import BufferClient
from tests.buffer_server import start_buffer
from tests.integration.stack_tools import eventually
from tests.ledger_support import make_group, make_task, open_book
from tests.redis_server import RedisServer

from areal_launch.run_folder import RunFolder
from areal_launch.stack.stores import redis_spec

# write(9</…/appendonly.aof.1.incr.aof>, "…"…, 512) = 512
_CALL = re.compile(r"^(?P<thread>\d+) +(?P<name>\w+)\((?P<fd>\d+)<(?P<file>[^>]*)>(?P<rest>.*)")


class Trace:
    """The writes and syncs of one thread: `aof` (with its text), `sync` and `reply`.

    With `everysec` another thread syncs, whenever it likes; it is left out.
    """

    def __init__(self, file: Path, thread: int) -> None:
        self._file, self._thread = file, str(thread)

    def events(self) -> list[tuple[str, str]]:
        found = []
        for line in self._file.read_text(errors="replace").splitlines():
            call = _CALL.search(line)
            if call is None or call["thread"] != self._thread:
                continue
            name, file, rest = call["name"], call["file"], call["rest"]
            if ".aof" in file:
                found.append(("sync" if name in {"fdatasync", "fsync"} else "aof", rest))
            elif file.startswith(("socket:", "TCP:")):
                found.append(("reply", rest))
        return found

    def after(self, mark: str) -> list[str]:
        """What happened from the append of `mark` to the file up to the reply after it."""
        events = self.events()
        start = next((i for i, (k, rest) in enumerate(events) if k == "aof" and mark in rest), None)
        if start is None:
            return []
        kinds = [kind for kind, _ in events[start:]]
        return kinds[: kinds.index("reply") + 1] if "reply" in kinds else []


@pytest.fixture
def traced(tmp_path: Path) -> Iterator[Callable[[str], tuple[RedisServer, Trace]]]:
    """Starts a Redis and a trace of all its threads."""
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("strace is not installed (apt-get install strace)")
    servers: list[RedisServer] = []
    tracers: list[subprocess.Popen[bytes]] = []

    def start(policy: str) -> tuple[RedisServer, Trace]:
        server = RedisServer(tmp_path / f"redis-{policy}", appendfsync=policy)
        server.start()
        servers.append(server)
        file = tmp_path / f"{policy}.strace"
        calls = "trace=write,writev,sendto,sendmsg,fsync,fdatasync"
        tracers.append(
            subprocess.Popen(
                [
                    *(strace, "-f", "-y", "-s", "1000000", "-e", calls),
                    *("-o", str(file), "-p", str(server.pid)),
                ],
                stderr=subprocess.DEVNULL,
            )
        )
        eventually(lambda: _tracer(server.pid) > 0, "strace is attached", 60)
        return server, Trace(file, server.pid)

    yield start
    for tracer in tracers:
        tracer.terminate()
        tracer.wait(10)
    for server in servers:
        server.kill()


def _tracer(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("TracerPid:")[1].split()[0])


@pytest.mark.parametrize("policy", ["always", "everysec"])
async def test_acknowledgement_when_the_policy_is_always_then_after_the_fsync(
    traced: Callable[[str], tuple[RedisServer, Trace]], tmp_path: Path, policy: str
) -> None:
    server, trace = traced(policy)
    with start_buffer(tmp_path, server.url, "train_dataset.batch_size=1") as address:
        client = BufferClient(address)
        try:
            registered = await client.register_trainer(
                resume_step=0,
                batch_size=1,
                max_head_offpolicyness=0,
                max_concurrent_rollouts=4,
            )
            await client.submit_tasks([make_task("mark-submit")])
            (lease,), _ = await client.lease_tasks("w", 1, 5)
            assert await client.complete_task(
                "mark-submit", lease.token, make_group("mark-submit"), "w"
            )
            await client.take_batch(registered.incarnation, 1, 5)
            assert await client.commit_step(registered.incarnation, 1, 0) == 1
        finally:
            await client.close()
    # Effects of the scripts in the append-only file: CompleteTasks stores the group, CommitStep
    # moves the task to `trained` and the committed step to 1.
    for mark in ("group:mark-submit", "last_committed"):
        kinds = eventually(lambda mark=mark: trace.after(mark), f"{mark} in the trace", 60)
        assert kinds[0] == "aof"
        assert kinds[-1] == "reply"
        assert ("sync" in kinds) == (policy == "always"), (mark, kinds)


def test_launcher_when_it_starts_redis_then_with_an_fsync_before_each_acknowledgement(
    tmp_path: Path,
) -> None:
    argv = redis_spec(RunFolder(tmp_path), 6379).argv
    assert argv[argv.index("--appendonly") + 1] == "yes"
    assert argv[argv.index("--appendfsync") + 1] == "always"


async def test_replica_when_it_confirmed_by_wait_then_promoted_it_has_what_was_acknowledged(
    tmp_path: Path,
) -> None:
    primary, replica = RedisServer(tmp_path / "primary"), RedisServer(tmp_path / "replica")
    try:
        primary.start()
        replica.start()
        follower = redis.Redis.from_url(replica.url, socket_timeout=30.0)
        leader = redis.Redis.from_url(
            primary.url, single_connection_client=True, socket_timeout=30.0
        )
        try:
            await leader.config_set("repl-diskless-sync-delay", 0)
            await follower.execute_command("REPLICAOF", "127.0.0.1", str(primary.port))
            async with open_book(primary.url, namespace="test/failover") as book:
                await book.register()
                await book.run("a", "b")
                assert await book.take(1) == ("taken", ["a", "b"])
                # WAIT vouches for what its own connection wrote, and so for all before that.
                await leader.set("after", "the ledger's writes")
                assert await leader.execute_command("WAIT", 1, 20_000) == 1
                before = await book.counts()
            primary.kill()
            await follower.execute_command("REPLICAOF", "NO", "ONE")
            async with open_book(replica.url, namespace="test/failover") as book:
                book.incarnation = 1
                assert await book.counts() == before == {"batched": 2}
                assert await book.take(1) == ("taken", ["a", "b"])
                assert await book.store.commit(1, 1, 0) == 1
            # Alone it cannot promise a second copy, and says so instead of waiting forever.
            assert await follower.execute_command("WAIT", 1, 100) == 0
        finally:
            await follower.aclose()
            await leader.aclose()
    finally:
        primary.kill()
        replica.kill()
