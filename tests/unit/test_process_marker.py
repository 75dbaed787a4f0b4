"""Which tests are taken to start processes, and what becomes of one that does so unseen."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Callable
from functools import partial

import pytest
from tests.plugins.process_marker import ProcessCode
from tests.redis_server import RedisServer
from tests.service_process import service_process

from areal_launch.processes.process import Child
from areal_launch.processes.supervisor import Supervised

pytest_plugins = ["pytester"]


def direct() -> None:
    subprocess.run(["true"], check=True)


async def by_asyncio() -> None:
    await asyncio.create_subprocess_exec("true")


def by_a_helper() -> None:
    direct()


def by_a_helper_elsewhere() -> object:
    return service_process


def by_an_inner_function() -> Callable[[], object]:
    return lambda: direct()


class Rig:
    """A helper whose methods start one."""

    @property
    def child(self) -> None:
        direct()

    @staticmethod
    def other() -> None: ...


def by_a_class() -> object:
    return Rig()


def by_the_library() -> object:
    return Child.start


def by_a_default() -> object:
    return Supervised


def stores() -> object:
    return RedisServer


def nothing() -> str:
    return "subprocess.run"


@pytest.mark.parametrize(
    ("function", "starts"),
    [
        *((each, True) for each in (direct, by_asyncio, by_a_helper, by_a_helper_elsewhere)),
        *((each, True) for each in (by_an_inner_function, by_a_class, by_the_library)),
        *((each, True) for each in (by_a_default, partial(direct))),
        *((each, False) for each in (stores, nothing)),
    ],
)
def test_code_when_it_mentions_what_starts_a_process_then_found(
    function: Callable[[], object], starts: bool
) -> None:
    assert ProcessCode().starts_process(function) is starts


@pytest.mark.process  # what it runs does
def test_marker_when_tests_run_then_those_that_mention_a_process_have_it_and_others_are_watched(
    pytester: pytest.Pytester,
) -> None:
    pytester.makeini(
        "[pytest]\nmarkers = process: p\nasyncio_default_fixture_loop_scope = function"
    )
    pytester.makeconftest(
        "import pytest\n"
        "from tests.plugins.process_marker import ProcessMarker\n"
        "def pytest_configure(config):\n"
        "    config.pluginmanager.register(ProcessMarker())\n"
        "@pytest.fixture\n"
        "def rig():\n"
        "    import subprocess\n"
        "    return subprocess.Popen(['true']).wait()\n"
    )
    pytester.makepyfile(
        test_a="""
            import importlib, subprocess
            def test_seen(): subprocess.run(['true'])
            def test_unseen():
                getattr(importlib.import_module('sub' + 'process'), 'r' + 'un')(['true'])
            def test_fixture(rig): assert rig == 0
            def test_none(): pass
        """
    )
    result = pytester.runpytest_inprocess("-p", "no:xdist", "-m", "not process")
    result.assert_outcomes(passed=1, failed=1, deselected=2)
    result.stdout.fnmatch_lines(["starts processes (true), but mentions nothing that does: *"])
