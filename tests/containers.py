"""Redis and NATS in containers: the stores as Compose and the chart run them, by testcontainers.

Only images that are on this machine are used: those of `make images`, or upstream's once pulled.
Where there is no engine, or neither image, the same tests run on processes (tests/redis_server.py,
tests/nats_server.py): nothing is skipped.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import cache

from tests.ports import free_port

STORES = f"areal/stores:{os.environ.get('AREAL_TAG', 'dev')}"
IMAGES = {"redis": ("redis:8-alpine", STORES), "nats": ("nats:2-alpine", STORES)}
COMMANDS = {
    "redis": "redis-server --bind 0.0.0.0 --protected-mode no --appendonly yes --dir /tmp",
    "nats": "nats-server --jetstream --store_dir /tmp/nats",
}
PORTS = {"redis": 6379, "nats": 4222}
READY = {"redis": re.compile("Ready to accept connections"), "nats": re.compile("Server is ready")}


@cache
def image_of(store: str) -> str:
    """The first of its images that is here; "" where there is none, or no engine."""
    import docker

    try:
        with closing(docker.from_env(timeout=20)) as client:
            here = {tag for image in client.images.list() for tag in image.tags}
    except docker.errors.DockerException:
        return ""
    return next((image for image in IMAGES[store] if image in here), "")


class ContainerStore:
    """One store in a container; may be killed and started again on the same port, empty."""

    def __init__(self, store: str) -> None:
        """Starts nothing; `image_of(store)` must be there."""
        self._store = store
        self._image = image_of(store)
        assert self._image, f"no image of {store} here"
        self.port = free_port()
        self.url = {
            "redis": f"redis://127.0.0.1:{self.port}/0",
            "nats": f"nats://127.0.0.1:{self.port}",
        }[store]
        self._container = None

    def start(self) -> None:
        from testcontainers.core.config import testcontainers_config
        from testcontainers.core.container import DockerContainer
        from testcontainers.core.wait_strategies import LogMessageWaitStrategy

        testcontainers_config.ryuk_disabled = True  # a reaper would be one more image
        container = (
            DockerContainer(self._image)
            .with_command(COMMANDS[self._store])
            .waiting_for(LogMessageWaitStrategy(READY[self._store]).with_startup_timeout(60))
        )
        container.ports[str(PORTS[self._store])] = ("127.0.0.1", self.port)  # of the loopback only
        container.start()
        self._container = container

    def kill(self) -> None:
        """SIGKILL, and the container is gone."""
        if self._container is not None:
            self._container.stop(force=True)
            self._container = None


@contextmanager
def store_in_container(store: str) -> Iterator[str]:
    """Yields the URL of a fresh store; removes it at the end."""
    server = ContainerStore(store)
    try:
        server.start()
        yield server.url
    finally:
        server.kill()
