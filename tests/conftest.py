"""What every suite shares."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from hypothesis import HealthCheck, settings
from tests.plugins.costs import Costs
from tests.plugins.order import Order, commit
from tests.plugins.process_marker import ProcessMarker

from areal.chassis.collector import collector_paused
from areal.chassis.logging import LossyStream


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("areal")
    group.addoption("--costs", type=Path, metavar="FOLDER", help="record what each test costs")
    group.addoption(
        "--share",
        type=commit,
        metavar="COMMIT",
        help="only the share of a commit (of long tests)",
    )
    group.addoption("--share-seconds", type=float, default=600.0, help="of one share (600)")


def _spare_own_group(event: str, arguments: tuple[Any, ...]) -> None:
    """A process that is not up yet has pid 0, which to the kernel is the group of the whole run."""
    if event in ("os.kill", "os.killpg") and arguments[0] == 0:
        raise ProcessLookupError(f"{event}(0): the process to be signalled was not up yet")


def pytest_configure(config: pytest.Config) -> None:
    sys.addaudithook(_spare_own_group)
    # How fast inputs are made and tried depends on the machine: no test measures speed.
    settings.register_profile("areal", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("areal")
    in_worker = "PYTEST_XDIST_WORKER" in os.environ
    share, seconds = config.getoption("--share"), config.getoption("--share-seconds")
    plugins: list[object] = [ProcessMarker(), Order(share, seconds, longest_first=in_worker)]
    if (folder := config.getoption("--costs")) is not None:
        plugins.append(Costs(folder))
    for plugin in plugins:
        config.pluginmanager.register(plugin)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """It imports thousands of modules."""
    with collector_paused():
        return (yield)


@pytest.fixture(autouse=True)
def logs_as_before() -> Iterator[None]:
    """A main function that ran in this process set up logs to a stream that is closed by now."""
    yield
    if structlog.is_configured():
        structlog.reset_defaults()
        structlog.contextvars.clear_contextvars()
        for handler in logging.getLogger().handlers[:]:
            if isinstance(getattr(handler, "stream", None), LossyStream):
                logging.getLogger().removeHandler(handler)


@pytest.fixture(scope="module", autouse=True)
def no_process_group_left() -> Iterator[None]:
    """An engine that a test left open would meet the tests of other files in its process."""
    yield
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny model with a tokenizer; it is only read."""
    import torch

    from areal_torch.models.tiny import make_tiny_model

    torch.set_num_threads(1)
    return Path(make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", seed=0))
