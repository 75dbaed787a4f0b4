"""Reward workers in boxes: what a reward can do there, and what happens where there are none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.buffer_client import BufferClient
from tests.integration.test_sandbox import REASON
from tests.service_process import service_process

from areal.clients.reward import RewardClient
from areal.protocol.scores import ScoreError, ScoreFailure, ScoreItem

pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON or "boxes work")
RECIPE = b"""
import json, os, socket, subprocess, sys, time
import numpy as np  # packages are there

def reward_fn(completion, answer):
    return float(np.float64(completion == answer))

def attack(completion, code):
    try:
        exec(code, {})
    except BaseException as error:
        raise RuntimeError(f"{type(error).__name__} of the code")
    return 1.0

def hang(completion):
    subprocess.Popen(["sleep", "4250"], start_new_session=True)
    while True: time.sleep(1)

def big(completion):
    return float(len([bytearray(1 << 20) for _ in range(4096)]))
"""
ATTACKS = {
    "network": "import socket; socket.create_connection(('127.0.0.1', 1), 2)",
    "this repository": f"open({str(Path(__file__).resolve())!r})",
    "packages": "import numpy; open(numpy.__file__, 'a')",
    "accounts": "open('/etc/passwd')",
    "the service": "import os\nfor p in range(3, 40000): os.kill(p, 0)",
    "namespaces": "import os, ctypes; l = ctypes.CDLL(None, use_errno=True)\n"
    "if l.unshare(0x10000000): raise OSError(ctypes.get_errno(), 'unshare')",
    "the kernel": "open('/proc/sys/kernel/hostname', 'w').write('x')",
}


async def test_reward_when_its_worker_is_in_a_box_then_it_scores_and_reaches_nothing(
    buffer: BufferClient, buffer_address: str, tmp_path: Path
) -> None:
    digest = await buffer.put_recipe("boxed.py", RECIPE)
    config = (
        # Far more than a busy machine needs until `big` has used up its memory.
        f"reward: {{isolation: sandbox, timeout_s: 20}}\nendpoints: {{buffer: '{buffer_address}'}}"
    )
    async with service_process("areal_reward", tmp_path, config) as service:
        client = RewardClient(service.listen)
        items = [ScoreItem("1+1=", each, data={"answer": "2"}) for each in ("2", "3")]
        assert await client.score("reward_fn", digest, {}, items) == [1.0, 0.0]
        assert await client.score("math", "", {}, items) == [1.0, 0.0]
        attacks = ATTACKS | {"the machine's /tmp": f"open({str(tmp_path / 'areal_reward.yaml')!r})"}
        items = [ScoreItem("", "", data={"code": code}) for code in attacks.values()]
        for name, result in zip(
            attacks, await client.score("attack", digest, {}, items), strict=True
        ):
            assert isinstance(result, ScoreFailure), name
            assert "Error of the code" in result.message, (name, result)
        for function, error in (("hang", ScoreError.TIMEOUT), ("big", ScoreError.CRASH)):
            (result,) = await client.score(function, digest, {}, [ScoreItem("", "")])
            assert isinstance(result, ScoreFailure)
            assert result.error is error, result
        assert await client.score("math", "", {}, [ScoreItem("", "2", data={"answer": "2"})]) == [
            1.0
        ]
        await client.close()


async def test_reward_when_there_are_no_boxes_then_the_service_names_what_is_missing(
    tmp_path: Path,
) -> None:
    (tmp_path / "bin").mkdir()
    fake = tmp_path / "bin" / "bwrap"
    fake.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    fake.chmod(0o755)
    environment = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin"}
    config = "reward: {isolation: sandbox}"
    with pytest.raises(AssertionError, match=r"reward\.isolation sandbox.*unprivileged users"):
        async with service_process("areal_reward", tmp_path, config, environment=environment):
            pass
    log = (tmp_path / "areal_reward.log").read_text()
    assert json.dumps("No permissions")[1:-1] in log
