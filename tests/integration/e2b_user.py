"""What a user of E2B does, with the SDK of PyPI, unchanged. Run by test_e2b_sdk.py: URL, key."""

import sys

from e2b import (
    CommandExitException,
    FileNotFoundException,
    RateLimitException,
    Sandbox,
    SandboxException,
    TimeoutException,
)

URL, KEY = sys.argv[1:3]
OPTIONS = {"api_url": URL, "sandbox_url": URL, "api_key": KEY}


def raised(kind, call, *arguments, **options):
    """Calls; returns the exception of that kind that it raises."""
    try:
        call(*arguments, **options)
    except kind as error:
        return error
    raise AssertionError(f"{call} raised no {kind}")


def commands(box):
    """Runs commands: whole, in the background, with input, beyond their time."""
    result = box.commands.run("echo $A $B; echo no >&2; pwd", envs={"B": "2"})
    assert (result.stdout, result.stderr, result.exit_code) == ("1 2\n/tmp\n", "no\n", 0), result
    assert raised(CommandExitException, box.commands.run, "exit 3").exit_code == 3
    handle = box.commands.run("echo on; read x; echo got $x; sleep 60", background=True, stdin=True)
    assert [process.pid for process in box.commands.list()] == [handle.pid]
    box.commands.send_stdin(handle.pid, "word\n")
    seen = ""
    for stdout, _, _ in handle:
        seen += stdout or ""
        if "got word" in seen:
            break
    assert box.commands.connect(handle.pid).pid == handle.pid
    assert handle.kill()
    assert not box.commands.kill(handle.pid)
    handle = box.commands.run("cat", background=True, stdin=True)
    handle.send_stdin("abc")
    handle.close_stdin()
    assert handle.wait().stdout == "abc"
    raised(TimeoutException, box.commands.run, "sleep 30", timeout=1.5)


def files(box):
    """Writes, reads, lists, renames and removes."""
    assert box.files.write("dir/a.txt", "hello").path == "/tmp/dir/a.txt"
    assert box.files.read("dir/a.txt") == "hello"
    assert box.files.read("/home/user/dir/a.txt", format="bytes") == b"hello"
    box.files.write_files([{"path": "x", "data": b"1"}, {"path": "y", "data": "2"}])
    assert sorted(entry.name for entry in box.files.list(".")) == ["dir", "x", "y"]
    assert box.files.exists("x")
    assert not box.files.exists("z")
    assert box.files.make_dir("m/n")
    assert not box.files.make_dir("m/n")
    box.files.rename("x", "m/x")
    box.files.remove("y")
    assert box.files.get_info("m/x").size == 1
    raised(FileNotFoundException, box.files.read, "z")


def leases(box):
    """Shares the box, and ends it."""
    again = Sandbox.connect(box.sandbox_id, **OPTIONS)
    assert again.files.read("dir/a.txt") == "hello"
    again.set_timeout(300)
    assert again.get_info().metadata == {"who": "agent"}
    assert [each.sandbox_id for each in Sandbox.list(**OPTIONS).next_items()] == [box.sandbox_id]
    raised(RateLimitException, Sandbox.create, **OPTIONS, retries=0)  # the only box is lent
    raised(SandboxException, Sandbox.create, template="mine", **OPTIONS)
    assert box.kill()
    assert not box.is_running()
    assert not box.kill()


def main():
    """All of it, in one box."""
    box = Sandbox.create(timeout=120, metadata={"who": "agent"}, envs={"A": "1"}, **OPTIONS)
    commands(box)
    files(box)
    leases(box)


main()
