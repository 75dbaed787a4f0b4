"""A puller's folder is memory: what is in it besides the newest versions goes."""

from __future__ import annotations

import pytest
from tests.contract.transport_rig import HEADERS, Rig, run

from areal.errors import InvalidInput
from areal.weights import fetch
from areal.weights.fetch import fetch_version


async def test_pull_when_versions_come_one_after_the_other_then_the_newest_two_stay(
    rig: Rig,
) -> None:
    memory = rig.root / "memory"
    for number in (1, 2, 3):
        version = await run(
            lambda n=number: rig.publisher("disk").publish(rig.noisy(n), rig.announce)
        )
        location = rig.location("stream", version)
        await run(lambda at=location: fetch_version(at, HEADERS, memory))
        here = sorted(folder.name for folder in memory.iterdir())
        assert here == [f"v{n:08}-inc1" for n in range(max(1, number - 1), number + 1)]
    await run(lambda: fetch_version(location, HEADERS, memory, keep=1))  # it is there
    assert len(list(memory.iterdir())) == 2


async def test_pull_when_what_comes_is_not_what_was_announced_then_nothing_of_it_stays(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = rig.root / "memory"
    version = await run(lambda: rig.publisher("disk").publish(rig.noisy(1), rig.announce))
    location = rig.location("stream", version)

    def other(*_: object) -> None:
        raise InvalidInput("digest 00…, expected 11…")

    with monkeypatch.context() as patched:
        patched.setattr(fetch, "_check", other)
        with pytest.raises(InvalidInput, match="digest"):
            await run(lambda: fetch_version(location, HEADERS, memory))
    assert list(memory.iterdir()) == []
    assert (await run(lambda: fetch_version(location, HEADERS, memory))).version == 1
